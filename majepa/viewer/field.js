"use strict";

// The battle as data, and the field it is drawn on. Cells become pixels here; north, +y, is up.

const { recording, map, bounds, attacks } = JSON.parse(document.getElementById("battle").textContent);
const { header, steps, outcome } = recording;
const lastStep = steps.length - 1;
const numAgents = header.agent_names.length;
const COLUMNS = ["x", "y", "hp", "shield", "energy", "cooldown", "alive", "target"];
const MOVES = { north: [0, 1], south: [0, -1], east: [1, 0], west: [-1, 0] };
const PLANES = ["ground", "cliff", "air"];
const TOLERANCE = 1e-4;

const units = header.units.map((facts, index) => {
  const number = facts.side === "ally" ? index : index - numAgents;
  const kind = facts.kind.replaceAll("_", " ");
  const fell = steps.findIndex((step) => !step.units[index][6]);
  return { ...facts, index, number, fell, name: `${kind} ${number}` };
});

function unitAt(step, index) {
  return Object.fromEntries(steps[step].units[index].map((value, at) => [COLUMNS[at], value]));
}

/** All units at a time between two steps: the living on their way, the dying still there. */
function moment(time) {
  const step = Math.min(Math.floor(time), lastStep);
  const part = time - step;
  return units.map((facts) => {
    const before = unitAt(step, facts.index);
    const after = part > 0 ? unitAt(step + 1, facts.index) : before;
    const isHit = before.alive && after.hp + after.shield < before.hp + before.shield - 0.01;
    const unit = { ...facts, ...before, fading: before.alive && !after.alive ? part : 0, hit: isHit ? part : 0 };
    for (const name of ["hp", "shield", "energy"]) unit[name] += part * (after[name] - before[name]);
    if (before.alive && after.alive) {
      unit.x += part * (after.x - before.x);
      unit.y += part * (after.y - before.y);
    }
    return unit;
  });
}

/** SMAC's rule: a living agent sees living units nearer than its sight range. */
function seenBy(agent, step) {
  const table = steps[step].units;
  const [x, y] = table[agent];
  const reach = units[agent].sight_range ** 2 - TOLERANCE;
  const isSeen = (row) => row[6] && (row[0] - x) ** 2 + (row[1] - y) ** 2 < reach;
  return new Set(table[agent][6] ? units.filter((_, at) => isSeen(table[at])).map((u) => u.index) : [agent]);
}

/** Whom an action is aimed at, as an index of a unit; healers target their own side. */
function aimOf(agent, action) {
  const number = /^target_(\d+)$/.exec(header.action_names[action])?.[1];
  if (number === undefined) return null;
  return Number(number) + (units[agent].weapon === "heal" ? 0 : numAgents);
}

class Field {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.resize();
  }

  /** Fit all that happens in this battle, with some ground around it, into the canvas. */
  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    this.ratio = window.devicePixelRatio || 1;
    this.width = Math.max(clientWidth, 1);
    this.height = Math.max(clientHeight, 1);
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    const [west, south, east, north] = bounds;
    const around = (column, low, high) => {
      let [least, most] = [Infinity, -Infinity];
      for (const step of steps) {
        for (const row of step.units) {
          least = Math.min(least, row[column]);
          most = Math.max(most, row[column]);
        }
      }
      return [Math.max(least - 3, low), Math.min(most + 3, high)];
    };
    const [left, right] = around(0, west, east);
    const [bottom, top] = around(1, south, north);
    this.scale = Math.min(this.width / (right - left), this.height / (top - bottom), 72);
    this.west = centred(left, right, this.width / this.scale, west, east);
    this.north = centred(bottom, top, this.height / this.scale, south, north) + this.height / this.scale;
    this.paintGround();
  }

  at(x, y) {
    return [(x - this.west) * this.scale, (this.north - y) * this.scale];
  }

  radiusOf(unit) {
    return Math.max(unit.radius * this.scale, 6.5);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["wall", "edge", "ground", "grid", "cliff", "hatch", "ally", "ally-rim", "enemy", "enemy-rim", "glyph",
      "ring", "fog", "trough", "shade", "good", "hurt", "bad", "shield", "energy", "spark", "mend", "flash"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  /** What is the same in every frame. */
  paintGround() {
    this.readColours();
    this.ground = document.createElement("canvas");
    this.ground.width = this.canvas.width;
    this.ground.height = this.canvas.height;
    const pen = this.ground.getContext("2d");
    const { spans, cliffs } = header.terrain;
    // On whole pixels, so that no seams show between spans.
    const cells = (list, grow, colour) => {
      pen.fillStyle = colour;
      for (const [y, from, to] of list) {
        const [left, top] = this.at(from - grow, y + 1 + grow).map((v) => Math.round(v * this.ratio));
        const [right, bottom] = this.at(to + grow, y - grow).map((v) => Math.round(v * this.ratio));
        pen.fillRect(left, top, right - left, bottom - top);
      }
    };
    pen.fillStyle = this.colours.wall;
    pen.fillRect(0, 0, this.ground.width, this.ground.height);
    cells([...spans, ...cliffs], 0.1, this.colours.edge);
    cells(spans, 0, this.colours.ground);
    cells(cliffs, 0, this.colours.cliff);
    pen.scale(this.ratio, this.ratio);
    pen.strokeStyle = this.colours.grid;
    pen.lineWidth = 1;
    for (const [y, from, to] of spans) {
      for (let x = from + 1; x < to; x++) if (x % 2 === 0) segment(pen, this.at(x, y), this.at(x, y + 1));
      if (y % 2 === 0) segment(pen, this.at(from, y), this.at(to, y));
    }
    pen.strokeStyle = this.colours.hatch;
    pen.lineWidth = Math.max(0.07 * this.scale, 1);
    for (const [y, from, to] of cliffs) {
      for (let x = 2 * from; x < 2 * to; x++) segment(pen, this.at(x / 2, y), this.at(x / 2 + 0.5, y + 1));
    }
  }

  draw(time, { agent, hovered, pointed, calm }) {
    const step = Math.min(Math.floor(time), lastStep);
    const part = calm ? 0 : time - step;
    const now = moment(step + part);
    const seen = agent === null ? null : seenBy(agent, step);
    const pen = this.pen;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.drawImage(this.ground, 0, 0);
    pen.scale(this.ratio, this.ratio);
    if (agent !== null) this.drawSight(now[agent]);
    const withAlpha = (unit, draw) => {
      pen.globalAlpha = seen && !seen.has(unit.index) ? 0.25 : 1;
      draw(unit);
      pen.globalAlpha = 1;
    };
    const living = now.filter((unit) => unit.alive).sort((a, b) => PLANES.indexOf(a.plane) - PLANES.indexOf(b.plane));
    const fights = attacks[step].map(([a, b]) => [now[a], now[b]]);
    for (const unit of now) if (!unit.alive) withAlpha(unit, () => this.drawFallen(unit));
    for (const [unit, target] of fights) withAlpha(unit, () => this.drawAttack(unit, target, part));
    for (const unit of living) withAlpha(unit, () => this.drawUnit(unit));
    for (const [unit, target] of fights) withAlpha(unit, () => this.drawImpact(unit, target));
    for (const unit of living) withAlpha(unit, () => this.drawBars(unit));
    if (agent !== null && now[agent].alive) this.drawIntentions(now, agent, step);
    for (const index of [hovered, pointed]) if (index !== null) this.drawRing(now[index], 1.5, 3);
    if (agent !== null) this.drawRing(now[agent], 2.5, 3.5);
    return now;
  }

  drawSight(unit) {
    const pen = this.pen;
    const [x, y] = this.at(unit.x, unit.y);
    const sight = unit.alive ? unit.sight_range * this.scale : 0;
    pen.beginPath();
    pen.rect(0, 0, this.width, this.height);
    pen.arc(x, y, sight, 0, 2 * Math.PI, true);
    pen.fillStyle = this.colours.fog;
    pen.fill();
    if (!unit.alive) return;
    pen.strokeStyle = this.colours.ally;
    pen.lineWidth = 1.5;
    pen.setLineDash([6, 5]);
    circle(pen, x, y, sight);
    pen.stroke();
    pen.lineWidth = 1;
    pen.globalAlpha = 0.6;
    pen.setLineDash([2, 4]);
    circle(pen, x, y, (unit.weapon_range + unit.radius) * this.scale);
    pen.stroke();
    pen.globalAlpha = 1;
    pen.setLineDash([]);
  }

  drawFallen(unit) {
    const pen = this.pen;
    const [x, y] = this.at(unit.x, unit.y);
    const arm = 0.5 * this.radiusOf(unit);
    const faint = 0.5 * pen.globalAlpha;
    pen.globalAlpha = faint;
    pen.strokeStyle = this.colours[unit.side];
    pen.lineWidth = Math.max(0.1 * this.scale, 2);
    pen.lineCap = "round";
    segment(pen, [x - arm, y - arm], [x + arm, y + arm]);
    segment(pen, [x - arm, y + arm], [x + arm, y - arm]);
    pen.lineCap = "butt";
  }

  drawAttack(unit, target, part) {
    const pen = this.pen;
    const [from, to] = [this.at(unit.x, unit.y), this.at(target.x, target.y)];
    const full = pen.globalAlpha;
    pen.strokeStyle = unit.weapon === "heal" ? this.colours.mend : this.colours[unit.side];
    pen.lineWidth = Math.max((unit.sweep ? 0.2 : 0.09) * this.scale, 1.5);
    pen.globalAlpha = 0.6 * full;
    segment(pen, from, to);
    if (part > 0 && Math.hypot(to[0] - from[0], to[1] - from[1]) > 2.5 * this.scale) {
      const point = (along) => [0, 1].map((axis) => from[axis] + along * (to[axis] - from[axis]));
      pen.globalAlpha = full;
      pen.strokeStyle = unit.weapon === "heal" ? this.colours.mend : this.colours.spark;
      segment(pen, point(Math.max(part - 0.12, 0)), point(Math.min(part + 0.12, 1)));
    }
  }

  drawUnit(unit) {
    const pen = this.pen;
    const [x, y] = this.at(unit.x, unit.y);
    const radius = this.radiusOf(unit) * (1 - 0.4 * unit.fading);
    const full = pen.globalAlpha * (1 - unit.fading);
    pen.globalAlpha = full;
    if (unit.plane === "air") {
      pen.fillStyle = this.colours.shade;
      circle(pen, x + 0.3 * this.scale, y + 0.35 * this.scale, radius);
      pen.fill();
    }
    pen.fillStyle = this.colours[unit.side];
    pen.strokeStyle = this.colours[`${unit.side}-rim`];
    pen.lineWidth = Math.max(0.13 * radius, 1);
    body(pen, unit, x, y, radius - pen.lineWidth / 2);
    pen.fill();
    pen.stroke();
    if (unit.hit > 0) {
      pen.globalAlpha = full * 0.5 * Math.sin(Math.PI * unit.hit);
      pen.fillStyle = this.colours.flash;
      pen.fill();
      pen.globalAlpha = full;
    }
    pen.fillStyle = this.colours.glyph;
    pen.font = `700 ${1.2 * radius}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(unit.glyph, x, y + 0.16 * radius);
  }

  /** Where an attack meets its target, all that shows of melee; of a beam, its sweep. */
  drawImpact(unit, target) {
    const pen = this.pen;
    const [dx, dy] = [unit.x - target.x, unit.y - target.y];
    const distance = Math.max(Math.hypot(dx, dy), target.radius);
    const colour = unit.weapon === "heal" ? this.colours.mend : this.colours.spark;
    if (unit.sweep) {
      const [ax, ay] = [(-dy * unit.sweep) / 2 / distance, (dx * unit.sweep) / 2 / distance];
      pen.strokeStyle = colour;
      pen.lineWidth = Math.max(0.12 * this.scale, 1.5);
      segment(pen, this.at(target.x - ax, target.y - ay), this.at(target.x + ax, target.y + ay));
      return;
    }
    const part = target.radius / distance;
    pen.fillStyle = colour;
    circle(pen, ...this.at(target.x + part * dx, target.y + part * dy), Math.max(0.12 * this.scale, 2));
    pen.fill();
  }

  drawBars(unit) {
    const pen = this.pen;
    const health = unit.hp < 0.3 * unit.hp_max ? "bad" : unit.hp < 0.6 * unit.hp_max ? "hurt" : "good";
    const bars = [[unit.hp, unit.hp_max, health]];
    if (unit.shield_max > 0) bars.push([unit.shield, unit.shield_max, "shield"]);
    if (unit.energy_max > 0) bars.push([unit.energy, unit.energy_max, "energy"]);
    if (bars.length === 1 && unit.hp >= unit.hp_max) return;
    const [x, y] = this.at(unit.x, unit.y);
    const radius = this.radiusOf(unit);
    const width = 2 * radius;
    const height = Math.min(Math.max(0.12 * this.scale, 2), 3.5);
    // Across the top of the unit itself: in a melee there is no room beside it.
    let top = y - 0.72 * radius - bars.length * (height + 1);
    pen.globalAlpha *= 1 - unit.fading;
    pen.fillStyle = this.colours.trough;
    pen.fillRect(x - radius - 1, top - 1, width + 2, bars.length * (height + 1) + 1);
    for (const [value, most, colour] of bars.reverse()) {
      pen.fillStyle = this.colours[colour];
      pen.fillRect(x - radius, top, width * Math.min(Math.max(value / most, 0), 1), height);
      top += height + 1;
    }
  }

  /** The policy on the ground: moves as arrows, targets as rings, the stronger the more probable. */
  drawIntentions(now, agent, step) {
    const pen = this.pen;
    const { legal, probabilities, orders } = steps[step];
    if (!orders) return;
    const unit = now[agent];
    const radius = this.radiusOf(unit);
    legal[agent].forEach((action, at) => {
      const weight = probabilities ? probabilities[agent][at] : Number(action === orders[agent]);
      if (weight < 0.03) return;
      const aim = aimOf(agent, action);
      const move = MOVES[header.action_names[action]];
      pen.globalAlpha = 0.25 + 0.75 * weight;
      pen.strokeStyle = pen.fillStyle = this.colours.ring;
      if (aim !== null && now[aim].alive) {
        const [x, y] = this.at(now[aim].x, now[aim].y);
        pen.lineWidth = 1 + 2 * weight;
        pen.setLineDash([4, 3]);
        circle(pen, x, y, this.radiusOf(now[aim]) + 5);
        pen.stroke();
        pen.setLineDash([]);
      } else if (move) {
        const [x, y] = this.at(unit.x, unit.y);
        const tip = radius + 10 + 14 * weight;
        const [dx, dy] = [move[0], -move[1]];
        const side = 3 + 3 * weight;
        pen.beginPath();
        pen.moveTo(x + dx * tip, y + dy * tip);
        for (const sign of [1, -1]) {
          pen.lineTo(x + dx * (radius + 7) + sign * dy * side, y + dy * (radius + 7) + sign * dx * side);
        }
        pen.fill();
      }
      pen.globalAlpha = 1;
    });
  }

  drawRing(unit, width, gap) {
    const pen = this.pen;
    pen.strokeStyle = this.colours.ring;
    pen.lineWidth = width;
    circle(pen, ...this.at(unit.x, unit.y), this.radiusOf(unit) + gap);
    pen.stroke();
  }

  /** The unit under a point of the canvas: a living one before a fallen one, the nearest first. */
  unitUnder(now, x, y, slack) {
    const near = now.map((unit) => {
      const [ux, uy] = this.at(unit.x, unit.y);
      const distance = Math.hypot(ux - x, uy - y);
      return { index: unit.index, distance: distance + (unit.alive ? 0 : 1000), within: distance <= Math.max(this.radiusOf(unit) + 2, slack) };
    });
    return near.filter((one) => one.within).sort((a, b) => a.distance - b.distance)[0]?.index ?? null;
  }
}

/** Where a window of some length begins that is centred on an interval and, if it can, stays within limits. */
function centred(low, high, length, least, most) {
  const start = (low + high - length) / 2;
  if (length >= most - least) return (least + most - length) / 2;
  return Math.min(Math.max(start, least), most - length);
}

function segment(pen, from, to) {
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}

function circle(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
}

function body(pen, unit, x, y, radius) {
  if (unit.side === "ally") return circle(pen, x, y, radius);
  pen.beginPath();
  for (let corner = 0; corner < 6; corner++) {
    const angle = (corner * Math.PI) / 3 + Math.PI / 6;
    pen.lineTo(x + 1.08 * radius * Math.cos(angle), y + 1.08 * radius * Math.sin(angle));
  }
  pen.closePath();
}
