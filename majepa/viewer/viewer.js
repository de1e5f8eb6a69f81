
// The page around the field: time, pointer, keys and the numbers beside it.

const element = (id) => document.getElementById(id);
const field = new Field(element("field"));
const calmly = window.matchMedia("(prefers-reduced-motion: reduce)");
const view = { time: 0, playing: false, agent: null, hovered: null, pointed: null, pointer: null, shown: -1, now: [] };

function make(tag, options = {}, ...children) {
  const node = Object.assign(document.createElement(tag), options);
  node.append(...children);
  return node;
}

function drawn(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0)} %`;
const brief = (value) => Number(value.toFixed(1)).toString();
const currentStep = () => Math.min(Math.floor(view.time), lastStep);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// Time.

let lastFrame = null;
let requested = false;

function refresh() {
  if (!requested) requestAnimationFrame(frame);
  requested = true;
}

function frame(clock) {
  requested = false;
  if (view.playing) {
    const elapsed = lastFrame === null ? 0 : Math.min((clock - lastFrame) / 1000, 0.25);
    view.time = Math.min(view.time + elapsed * Number(element("speed").value), lastStep);
    if (view.time >= lastStep) pause();
  }
  lastFrame = view.playing ? clock : null;
  show();
  if (view.playing) refresh();
}

function show() {
  view.now = field.draw(view.time, { ...view, calm: calmly.matches });
  const step = currentStep();
  if (step !== view.shown) showStep(step);
  for (const line of document.querySelectorAll(".now")) {
    line.setAttribute("d", `M${(view.time / Math.max(lastStep, 1)) * 100} 0V100`);
  }
  hover();
}

function play() {
  if (view.time >= lastStep) view.time = 0;
  view.playing = true;
  document.body.dataset.playing = "";
  element("play").setAttribute("aria-label", "Pause");
  refresh();
}

function pause() {
  view.playing = false;
  delete document.body.dataset.playing;
  element("play").setAttribute("aria-label", "Play");
}

function seek(step) {
  pause();
  view.time = Math.min(Math.max(step, 0), lastStep);
  show();
  announce();
}

/** One step on or back; from between two steps, to the next whole one. */
function move(direction) {
  seek(direction > 0 ? Math.floor(view.time) + 1 : Math.ceil(view.time) - 1);
}

function choose(agent) {
  view.agent = agent;
  view.shown = -1;
  document.body.dataset.agent = agent ?? "";
  element("actions").replaceChildren(...(agent === null ? [] : header.action_names.map((_, at) => actionRow(agent, at))));
  show();
}

// Numbers.

const full = { ally: 0, enemy: 0 };
for (const unit of units) full[unit.side] += unit.hp_max + unit.shield_max;

function strength(side, step) {
  const left = units.filter((unit) => unit.side === side).map((unit) => unitAt(step, unit.index));
  return left.reduce((sum, unit) => sum + (unit.alive ? unit.hp + unit.shield : 0), 0) / full[side];
}

function showStep(step) {
  view.shown = step;
  document.body.dataset.step = step;
  element("scrub").value = step;
  element("scrub").setAttribute("aria-valuetext", `step ${step} of ${lastStep}`);
  element("clock").replaceChildren("step ", make("b", { textContent: step }), ` / ${lastStep}`);
  element("return").textContent = steps[step].total_reward.toFixed(2);
  element("reward").textContent = `reward ${steps[step].reward.toFixed(2)} at this step`;
  for (const side of ["ally", "enemy"]) showTeam(side, step);
  showAgents(step);
  element("field").setAttribute("aria-label", `Battlefield of ${map}. ${standing(step)}`);
}

function showTeam(side, step) {
  const part = strength(side, step);
  const team = units.filter((unit) => unit.side === side);
  const tallies = [...new Set(team.map((unit) => unit.kind))].map((kind) => {
    const squad = team.filter((unit) => unit.kind === kind);
    const alive = squad.filter((unit) => unitAt(step, unit.index).alive).length;
    return make("span", { className: alive ? "" : "gone", textContent: `${kind.replaceAll("_", " ")} ${alive}/${squad.length}` });
  });
  const node = element(`team-${side}`);
  node.querySelector(".bar i").style.width = `${100 * part}%`;
  node.querySelector("small").textContent = percent(part);
  node.querySelector("p").replaceChildren(...tallies.flatMap((tally, at) => (at ? [" · ", tally] : [tally])));
}

function living(side, step) {
  const team = units.filter((unit) => unit.side === side);
  return [team.filter((unit) => unitAt(step, unit.index).alive).length, team.length];
}

function standing(step) {
  const [allies, enemies] = ["ally", "enemy"].map((side) => living(side, step).join(" of "));
  return `Step ${step} of ${lastStep}: ${allies} allies and ${enemies} enemies alive, return ${steps[step].total_reward.toFixed(2)}.`;
}

function announce() {
  element("announcement").textContent = standing(currentStep());
}

// Agents.

function actionLabel(agent, action) {
  const name = header.action_names[action];
  const aim = aimOf(agent, action);
  if (aim !== null) return `${units[agent].weapon === "heal" ? "heal" : "attack"} ${units[aim].name}`;
  return { no_op: "no-op", north: "↑ north", south: "↓ south", east: "→ east", west: "← west" }[name] ?? name;
}

function actionRow(agent, action) {
  const label = actionLabel(agent, action);
  const row = make("li", { title: `${label}: action ${action}, ${header.action_names[action]}` },
    make("span", { className: "mark" }), make("span", { className: "label", textContent: label }),
    make("span", { className: "bar" }, make("i")), make("span", { className: "value" }));
  row.addEventListener("pointerenter", () => { view.pointed = aimOf(agent, action); refresh(); });
  row.addEventListener("pointerleave", () => { view.pointed = null; refresh(); });
  return row;
}

function showAgents(step) {
  for (const button of element("agents").children) {
    const agent = Number(button.dataset.agent);
    const { hp, shield, alive } = unitAt(step, agent);
    const { hp_max, shield_max } = units[agent];
    button.classList.toggle("dead", !alive);
    button.setAttribute("aria-pressed", agent === view.agent);
    button.querySelector("i").style.width = `${(100 * (alive ? hp + shield : 0)) / (hp_max + shield_max)}%`;
  }
  element("agent").hidden = view.agent === null;
  element("hint").hidden = view.agent !== null;
  if (view.agent !== null) showAgent(view.agent, step);
}

function showAgent(agent, step) {
  const { legal, probabilities, orders } = steps[step];
  const seen = [...seenBy(agent, step)].filter((index) => index !== agent);
  const foes = seen.filter((index) => units[index].side === "enemy").length;
  const state = unitAt(step, agent).alive
    ? `sees ${count(seen.length - foes, "ally", "allies")} and ${count(foes, "enemy", "enemies")}`
    : `fell at step ${units[agent].fell}`;
  element("sees").replaceChildren(make("b", { textContent: capital(units[agent].name) }), ` ${state}; `,
    `${legal[agent].length} of ${header.action_names.length} actions legal`);
  [...element("actions").children].forEach((row, action) => {
    const at = legal[agent].indexOf(action);
    const isChosen = orders !== null && orders[agent] === action;
    const chance = at >= 0 && probabilities ? probabilities[agent][at] : null;
    row.hidden = at < 0 && aimOf(agent, action) !== null;
    row.className = `${at < 0 ? "illegal" : "legal"}${isChosen ? " chosen" : ""}`;
    row.dataset.probability = chance ?? "";
    row.querySelector(".mark").textContent = isChosen ? "●" : "";
    row.querySelector(".bar").hidden = !probabilities;
    row.querySelector(".bar i").style.width = `${100 * (chance ?? 0)}%`;
    row.querySelector(".value").textContent = chance === null ? "" : percent(chance);
    row.setAttribute("aria-current", isChosen);
  });
  const remark = orders === null ? "Nobody acts here: the recording ends."
    : probabilities ? `● is the action taken, ${header.choice === "argmax" ? "the most probable one" : "sampled"}.`
      : "● is the action taken. A scripted policy has no probabilities.";
  element("remark").textContent = remark;
  element("remark").hidden = false;
}

function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

// Pointer.

function hover() {
  const tip = element("tip");
  const at = view.pointer;
  const found = at === null ? null : field.unitUnder(view.now, at.x, at.y, at.touch ? 18 : 10);
  if (found !== view.hovered) {
    view.hovered = found;
    refresh();
  }
  element("field").style.cursor = found !== null && found < numAgents ? "pointer" : "default";
  tip.hidden = found === null;
  if (found === null) return;
  const unit = view.now[found];
  const words = make("dl");
  const line = (name, value) => words.append(make("dt", { textContent: name }), make("dd", { textContent: value }));
  if (unit.alive) {
    for (const [name, key] of [["Health", "hp"], ["Shield", "shield"], ["Energy", "energy"]]) {
      if (unit[`${key}_max`] > 0) line(name, `${brief(unit[key])} / ${brief(unit[`${key}_max`])}`);
    }
    line("Weapon", unit.cooldown > 0 ? `ready in ${brief(unit.cooldown)} loops` : "ready");
    line("Target", unit.target === null ? "none" : units[unit.target].name);
  } else {
    line("Fell at step", unit.fell);
  }
  line("Position", `${brief(unit.x)}, ${brief(unit.y)}`);
  const side = make("span", { className: unit.side, textContent: unit.side === "ally" ? " ally" : " enemy" });
  tip.replaceChildren(make("strong", {}, capital(unit.name), side), words);
  tip.dataset.unit = found;
  const [x, y] = field.at(unit.x, unit.y);
  const gap = field.radiusOf(unit) + 12;
  const left = x + gap + tip.offsetWidth > field.width ? x - gap - tip.offsetWidth : x + gap;
  const top = Math.min(Math.max(y - tip.offsetHeight / 2, 6), field.height - tip.offsetHeight - 6);
  tip.style.transform = `translate(${Math.max(left, 6)}px, ${Math.max(top, 6)}px)`;
}

function point(event) {
  const box = element("field").getBoundingClientRect();
  view.pointer = { x: event.clientX - box.left, y: event.clientY - box.top, touch: event.pointerType === "touch" };
  hover();
}

element("field").addEventListener("pointermove", point);
element("field").addEventListener("pointerdown", point);
element("field").addEventListener("pointerleave", (event) => {
  if (event.pointerType === "touch") return;
  view.pointer = null;
  hover();
});
element("field").addEventListener("click", () => {
  const found = view.hovered;
  if (found === null) choose(null);
  else if (found < numAgents) choose(found === view.agent ? null : found);
});

// Keys and controls. A button that was clicked gives the keys back to the page.

const KEYS = {
  " ": () => (view.playing ? pause() : play()),
  ArrowLeft: () => move(-1), ArrowRight: () => move(1), Home: () => seek(0), End: () => seek(lastStep),
  Escape: () => choose(null),
};

document.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  const isOnButton = event.target.closest?.("button, select");
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  if (isOnButton && (event.key === " " || isOnButton.tagName === "SELECT")) return;
  event.preventDefault();
  action();
});
document.addEventListener("click", (event) => {
  if (event.detail > 0) event.target.closest("button")?.blur();
});
element("play").addEventListener("click", KEYS[" "]);
element("first").addEventListener("click", KEYS.Home);
element("last").addEventListener("click", KEYS.End);
element("back").addEventListener("click", KEYS.ArrowLeft);
element("forward").addEventListener("click", KEYS.ArrowRight);
element("scrub").addEventListener("input", (event) => seek(Number(event.target.value)));
element("speed").addEventListener("change", (event) => event.target.blur());

// What is made once.

function curve(values, low, high, height = 100) {
  const points = values.map((value, at) => [(at / Math.max(lastStep, 1)) * 100, height - ((value - low) / (high - low || 1)) * height]);
  return `M${points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L")}`;
}

function makeChart(id, label, ...shapes) {
  const chart = element(id);
  chart.setAttribute("viewBox", "0 0 100 100");
  chart.setAttribute("aria-label", label);
  chart.append(...shapes, drawn("path", { class: "now" }));
  const follow = (event) => {
    const box = chart.getBoundingClientRect();
    if (event.buttons) seek(Math.round(((event.clientX - box.left) / box.width) * lastStep));
  };
  chart.addEventListener("pointerdown", follow);
  chart.addEventListener("pointermove", follow);
}

function makeReturns() {
  const returns = steps.map((step) => step.total_reward);
  const [low, high] = [Math.min(0, ...returns), Math.max(...returns)];
  const line = curve(returns, low, high, 72);
  const most = Math.max(...steps.map((step) => Math.abs(step.reward)), 1e-9);
  const width = 100 / (lastStep + 1);
  const bars = steps.map((step, at) => {
    const height = (22 * Math.abs(step.reward)) / most;
    const x = (at / Math.max(lastStep, 1)) * 100 - 0.35 * width;
    return drawn("rect", { class: "reward", x, y: 100 - height, width: 0.7 * width, height });
  });
  makeChart("returns", `Return over time, ${returns[lastStep].toFixed(2)} at the end`,
    drawn("path", { class: "axis", d: "M0 72H100" }), drawn("path", { class: "area", d: `${line}V72H0Z` }),
    ...bars, drawn("path", { class: "return", d: line }));
}

function makePage() {
  const how = { argmax: "most probable actions", sampled: "sampled actions", scripted: "scripted policy" }[header.choice];
  element("map").textContent = map;
  element("outcome").textContent = outcome ?? "stopped";
  element("outcome").classList.add(outcome ?? "stopped");
  element("played").textContent =
    `${header.player} (${how}) · seed ${header.seed} · ${lastStep} of ${header.limit} steps · ` +
    `${header.environment} ${header.environment_version} · majepa ${header.majepa}`;
  element("scrub").max = lastStep;
  for (const [side, words] of [["ally", "Allies"], ["enemy", "Enemies"]]) {
    element("teams").append(make("div", { id: `team-${side}`, className: "team" },
      make("h2", {}, words, make("small")), make("div", { className: "bar" }, make("i", { className: side })), make("p")));
  }
  for (const unit of units.filter((one) => one.fell > 0)) {
    const mark = make("i", { className: unit.side });
    mark.style.left = `${(unit.fell / Math.max(lastStep, 1)) * 100}%`;
    element("deaths").append(mark);
  }
  for (const unit of units.slice(0, numAgents)) {
    const button = make("button", { title: capital(unit.name) }, unit.glyph, make("sub", { textContent: unit.number }), make("i"));
    button.dataset.agent = unit.index;
    button.setAttribute("aria-label", `Agent ${unit.number}, ${unit.kind.replaceAll("_", " ")}`);
    button.addEventListener("click", () => choose(unit.index === view.agent ? null : unit.index));
    element("agents").append(button);
  }
  const strengths = (side) => curve(steps.map((_, step) => strength(side, step)), 0, 1);
  makeChart("strength", "Strength of both sides over time", drawn("path", { class: "axis", d: "M0 100H100" }),
    drawn("path", { class: "enemy", d: strengths("enemy") }), drawn("path", { class: "ally", d: strengths("ally") }));
  makeReturns();
}

function repaint() {
  field.resize();
  show();
}

// On paper: the end of the battle, in light colours, with nobody chosen.
let beforePrint = null;
window.addEventListener("beforeprint", () => {
  beforePrint = { time: view.time, agent: view.agent };
  document.documentElement.classList.add("printing");
  pause();
  view.time = lastStep;
  choose(null);
  repaint();
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  view.time = beforePrint.time;
  choose(beforePrint.agent);
  repaint();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new ResizeObserver(repaint).observe(element("field"));

makePage();
const wish = new URLSearchParams(window.location.hash.slice(1));
const wanted = Number(wish.get("agent") ?? NaN);
view.time = Math.min(Math.max(Number(wish.get("step")) || 0, 0), lastStep);
choose(wanted >= 0 && wanted < numAgents ? Math.floor(wanted) : null);

/** For tests and for pages around this one. Positions are in cells, and in pixels of the page. */
window.majepaViewer = {
  play, pause, seek, choose,
  get step() { return currentStep(); },
  units() {
    const box = element("field").getBoundingClientRect();
    return view.now.map((unit) => {
      const [x, y] = field.at(unit.x, unit.y);
      return { name: unit.name, side: unit.side, alive: Boolean(unit.alive), hp: unit.hp, x: unit.x, y: unit.y,
        pageX: box.left + x, pageY: box.top + y };
    });
  },
};
