// The list of runs: selected to be compared.

const form = document.getElementById("runs");
if (form) {
  const submit = form.querySelector("[type=submit]");
  const count = () => {
    const chosen = form.querySelectorAll("[name=run]:checked").length;
    submit.disabled = chosen < 2;
    submit.textContent = chosen < 2 ? "Compare the selected" : `Compare ${chosen} runs`;
  };
  form.addEventListener("change", count);
  count();
}
