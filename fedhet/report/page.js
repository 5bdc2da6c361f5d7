"use strict";

// Tables: a click on a column's head sorts by it.

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    if (!head.textContent) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending" && head.classList.contains("n")
        || head.getAttribute("aria-sort") === "ascending";
      const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
      const order = (a, b) => {
        const x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        const sign = down ? -1 : 1;
        return sign * (head.classList.contains("n") ? x - y : x.localeCompare(y, "en", {numeric: true}));
      };
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...[...body.rows].sort(order));
    });
  });
}

// A field above a table: only the rows that have all of its words are shown.

function filtering(field) {
  const rows = document.getElementById(field.dataset.rows).querySelectorAll("tbody tr");
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase().split(/\s+/).filter(word => word);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every(word => text.includes(word));
    }
  });
}

// Values in words. What is shown is set as text, never as markup.

const scaled = (value, units, base) => {
  let power = 0;
  while (Math.abs(value) >= base * 0.9995 && power < units.length - 1) { value /= base; power += 1; }
  return `${power ? value.toPrecision(3) : Math.round(value)} ${units[power]}`;
};

const words = {
  none: () => "",
  number: value => Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4))),
  score: value => value.toFixed(4),
  bytes: value => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000),
  seconds: value => `${value.toPrecision(3)} s`,
};

// Figures: the values under the pointer, and series that are switched off and on.

const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "status");
tip.hidden = true;
document.body.append(tip);

const place = (value, [low, high, log], start, end) => {
  const scale = log ? Math.log10 : number => number;
  return start + (end - start) * (scale(value) - scale(low)) / (scale(high) - scale(low));
};

class Chart {
  constructor(svg, figure) {
    this.svg = svg;
    this.off = new Set();
    this.panels = JSON.parse(svg.dataset.chart);
    for (const panel of this.panels) {
      const [left, top, right, bottom] = panel.box;
      for (const curve of panel.curves) {
        curve.points = curve.x.flatMap((x, n) => x === null || curve.y[n] === null ? [] : [{
          x, y: curve.y[n], name: curve.names?.[n] ?? "",
          left: place(x, panel.x, left, right), top: place(curve.y[n], panel.y, bottom, top),
        }]);
      }
    }
    this.marks = document.createElementNS(svg.namespaceURI, "g");
    this.marks.setAttribute("class", "marks");
    svg.append(this.marks);
    svg.addEventListener("pointermove", event => this.point(event));
    svg.addEventListener("pointerdown", event => this.point(event));
    svg.addEventListener("pointerleave", () => this.clear());
    for (const key of figure.querySelectorAll(".key[data-series]")) {
      key.addEventListener("click", () => this.toggle(key));
    }
  }

  toggle(key) {
    const series = Number(key.dataset.series), hide = !this.off.has(series);
    if (hide) this.off.add(series); else this.off.delete(series);
    key.setAttribute("aria-pressed", String(!hide));
    for (const part of this.svg.querySelectorAll(`[data-series="${series}"]`)) {
      part.classList.toggle("off", hide);
    }
    this.clear();
  }

  clear() {
    this.marks.replaceChildren();
    tip.hidden = true;
  }

  point(event) {
    const frame = this.svg.getBoundingClientRect(), view = this.svg.viewBox.baseVal;
    const left = (event.clientX - frame.left) * view.width / frame.width;
    const top = (event.clientY - frame.top) * view.height / frame.height;
    this.clear();
    const near = 8;
    const panel = this.panels.find(({box}) =>
      left > box[0] - near && left < box[2] + near && top > box[1] - near && top < box[3] + near);
    if (!panel) return;
    const curves = panel.curves.filter(curve => curve.points.length && !this.off.has(curve.s));
    if (!curves.length) return;
    const lines = panel.mode === "x" ? this.column(panel, curves, left) : this.nearest(panel, curves, left, top);
    if (lines) this.show(lines, event);
  }

  // All curves at the x that is nearest to the pointer.
  column(panel, curves, left) {
    const distance = point => Math.abs(point.left - left);
    const closest = points => points.reduce((a, b) => distance(b) < distance(a) ? b : a);
    const at = closest(curves.map(curve => closest(curve.points)));
    this.mark("line", {x1: at.left, x2: at.left, y1: panel.box[1], y2: panel.box[3]});
    const rows = [`${panel.head} ${words[panel.xUnit](at.x)}`];
    for (const curve of curves) {
      const point = curve.points.find(({x}) => x === at.x);
      if (!point) continue;
      if (panel.dots) this.mark("circle", {cx: point.left, cy: point.top, r: 3.5});
      rows.push(`${curve.name}  ${words[panel.unit](point.y)}`);
    }
    return rows;
  }

  // The point that is nearest to the pointer, and the whole of its curve.
  nearest(panel, curves, left, top) {
    let found = null, least = 40 ** 2;
    for (const curve of curves) {
      for (const point of curve.points) {
        const distance = (point.left - left) ** 2 + (point.top - top) ** 2;
        if (distance < least) { least = distance; found = {curve, point}; }
      }
    }
    if (!found) return null;
    const {curve, point} = found;
    if (!point.name && curve.points.length > 1) {
      this.mark("polyline", {points: curve.points.map(each => `${each.left},${each.top}`).join(" ")});
    }
    if (panel.dots) this.mark("circle", {cx: point.left, cy: point.top, r: 4});
    const x = words[panel.xUnit](point.x), y = words[panel.unit](point.y);
    const head = point.name ? "" : panel.xUnit === "number" ? `${panel.head} ${x}` : x;
    const tail = point.name && panel.xUnit === "score" ? x : "";
    return [curve.name, point.name, head, y, tail].filter(text => text);
  }

  mark(shape, attributes) {
    const mark = document.createElementNS(this.svg.namespaceURI, shape);
    for (const [name, value] of Object.entries(attributes)) mark.setAttribute(name, value);
    this.marks.append(mark);
  }

  show(lines, event) {
    tip.replaceChildren(...lines.map(line => {
      const row = document.createElement("div");
      row.textContent = line;
      return row;
    }));
    tip.hidden = false;
    const {width, height} = tip.getBoundingClientRect();
    const right = event.clientX + 14 + width < innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - width)}px`;
    tip.style.top = `${Math.min(Math.max(4, event.clientY - height / 2), innerHeight - height - 4)}px`;
  }
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll("input[data-rows]").forEach(filtering);
document.querySelectorAll("svg[data-chart]").forEach(svg => new Chart(svg, svg.parentElement));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
