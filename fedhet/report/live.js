// The status of a run under way: asked for every two seconds; a new round loads the page again.

const live = document.getElementById("live");
const marks = {failed: "bad", excluded: "bad", training: "busy"};

function showSites(clients) {
  const shown = clients.map(client => {
    const site = document.createElement("span");
    site.className = `site ${marks[client.state] ?? ""}`;
    site.textContent = `${client.name}: ${client.state}`;
    site.title = client.line;
    return site;
  });
  live.querySelector(".sites").replaceChildren(...shown);
}

async function follow() {
  let status;
  try {
    const answer = await fetch(live.dataset.status);
    if (!answer.ok) throw new Error(await answer.text());
    status = await answer.json();
  } catch (error) {
    live.querySelector(".words").textContent = `No answer from fedhet watch: ${error.message}`;
    setTimeout(follow, 5000);
    return;
  }
  if (status.recorded !== Number(live.dataset.rounds)) { location.reload(); return; }
  live.querySelector(".words").textContent = status.words;
  const bar = live.querySelector("progress");
  bar.max = Math.max(1, status.rounds);
  bar.value = status.recorded;
  live.dataset.stage = status.stage;
  if (status.stage === "starting" || status.stage === "running") showSites(status.clients);
  else showSites([]);
  if (status.stage !== "finished") setTimeout(follow, 2000);
}

if (live) follow();
