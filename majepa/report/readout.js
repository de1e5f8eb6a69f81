"use strict";
// The values of every line at the place under the pointer.
const units = {
  number: (v) => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en")
    : String(Number(v.toPrecision(4))),
  percent: (v) => `${(100 * v).toFixed(1)} %`,
  seconds: (v) => {
    const s = Math.round(v), m = Math.floor(s / 60);
    return m < 60 ? `${m} min ${s % 60} s` : `${Math.floor(m / 60)} h ${m % 60} min`;
  },
};
const box = document.body.appendChild(document.createElement("div"));
box.className = "readout";
box.hidden = true;

const nearest = (values, at) =>
  values.reduce((best, v, i) => Math.abs(v - at) < Math.abs(values[best] - at) ? i : best, 0);

for (const chart of document.querySelectorAll(".line-chart")) {
  const cursor = chart.querySelector(".cursor");
  const lines = [...chart.querySelectorAll(".series")].map((group) => ({
    label: group.dataset.label,
    style: group.getAttribute("class"),
    x: group.dataset.x.split(" ").map(Number),
    y: group.dataset.y.split(" ").map(Number),
    places: group.querySelector("polyline").getAttribute("points").split(" ")
      .map((pair) => Number(pair.split(",")[0])),
  }));
  const hide = () => {
    box.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("pointermove", (event) => {
    const frame = chart.getBoundingClientRect();
    const at = (event.clientX - frame.left) * chart.viewBox.baseVal.width / frame.width;
    const closest = lines
      .map((line) => ({ line, i: nearest(line.places, at) }))
      .sort((a, b) => Math.abs(a.line.places[a.i] - at) - Math.abs(b.line.places[b.i] - at))[0];
    const x = closest.line.x[closest.i], place = closest.line.places[closest.i];
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    const rows = lines.filter((line) => line.x.includes(x)).map((line) => {
      const row = document.createElement("div");
      row.className = line.style;
      const value = units[chart.dataset.yUnit](line.y[line.x.indexOf(x)]);
      row.textContent = lines.length > 1 ? `${line.label} ${value}` : value;
      return row;
    });
    const head = document.createElement("div");
    head.textContent = units[chart.dataset.xUnit](x)
      + (chart.dataset.xUnit === "number" ? " transitions" : "");
    box.replaceChildren(head, ...rows);
    box.hidden = false;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth
      - box.offsetWidth - 8);
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${event.clientY + 16}px`;
  });
}
