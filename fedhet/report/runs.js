// The list of runs: filtered by words, selected to be compared.

const filter = document.getElementById("filter");
if (filter) {
  const form = filter.form, submit = form.querySelector("[type=submit]");
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(word => word);
    for (const row of form.querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every(word => text.includes(word));
    }
  });
  const count = () => {
    const chosen = form.querySelectorAll("[name=run]:checked").length;
    submit.disabled = chosen < 2;
    submit.textContent = chosen < 2 ? "Compare the selected" : `Compare ${chosen} runs`;
  };
  form.addEventListener("change", count);
  count();
}
