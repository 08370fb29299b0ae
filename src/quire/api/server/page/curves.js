// The last two minutes as small curves.
import { css, named, onChange } from "./colours.js";
import { make } from "./dom.js";

const WINDOW_S = 120;

export class Curve {
  /** `series`: name and colour of each line; `say` turns a value into words.
   * A line ends where there is no value, unless its values are few and are `joined`. */
  constructor(title, series, say, { top = 0, joined = false } = {}) {
    this.title = title;
    this.series = new Map(series.map(([name, colour]) => [name, { colour, points: [] }]));
    this.say = say;
    this.top = top; // the least height of the scale
    this.joined = joined;
    this.last = {};
    this.canvas = make("canvas", { role: "img" });
    this.values = make("span", { class: "value" });
    const head = make("figcaption", {}, make("h3", { text: title }), this.values);
    this.element = make("figure", { class: "curve" }, head, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onChange(() => this.draw());
  }

  clear() {
    for (const each of this.series.values()) each.points = [];
    this.last = {};
  }

  /** A value of each series at a time in seconds; null is a gap. */
  add(at, values) {
    for (const [name, value] of Object.entries(values)) {
      const { points } = this.series.get(name) ?? {};
      if (!points) continue;
      points.push([at, value]);
      while (points.length && points[0][0] < at - WINDOW_S - 5) points.shift();
    }
    this.now = at;
    for (const [name, value] of Object.entries(values)) {
      if (value != null || !this.joined) this.last[name] = value;
    }
    this.#tell(this.last);
    this.draw();
  }

  #tell(values) {
    const told = [...this.series].filter(([name]) => values[name] != null);
    const parts = told.flatMap(([name, { colour }]) => {
      const mark = make("i");
      mark.style.background = `var(--${colour})`;
      const label = this.series.size > 1 ? `${name} ` : "";
      return [mark, make("span", { text: `${label}${this.say(values[name])}` })];
    });
    this.values.replaceChildren(...(parts.length ? parts : ["–"]));
    const said = told.map(([name]) => `${name} ${this.say(values[name])}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.title}, last two minutes; now ${said || "nothing"}`);
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || this.now === undefined) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const most = this.#most();
    const x = (at) => width - ((this.now - at) / WINDOW_S) * width;
    const y = (value) => height - 2 - (value / most) * (height - 14);
    this.#scale(context, width, y, most);
    for (const { colour, points } of this.series.values()) {
      this.#line(context, points.filter(([at]) => at > this.now - WINDOW_S - 3), x, y, named(colour), height);
    }
  }

  /** The next round number above all that is shown. */
  #most() {
    let most = this.top;
    for (const { points } of this.series.values()) {
      for (const [, value] of points) if (value > most) most = value;
    }
    if (most === 0) return 1;
    const power = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 5, 10].find((step) => step * power >= most * 0.999) * power;
  }

  #scale(context, width, y, most) {
    context.strokeStyle = css(named("line"));
    context.lineWidth = 1;
    for (const value of [0, most / 2, most]) {
      context.beginPath();
      context.moveTo(0, Math.round(y(value)) + 0.5);
      context.lineTo(width, Math.round(y(value)) + 0.5);
      context.stroke();
    }
    context.fillStyle = css(named("quiet"));
    context.font = "11px system-ui, sans-serif";
    context.fillText(this.say(most), 2, y(most) - 3);
  }

  #line(context, points, x, y, colour, height) {
    const parts = this.joined ? [points.filter(([, value]) => value != null)] : unbroken(points);
    for (const part of parts) {
      if (!part.length) continue;
      context.beginPath();
      part.forEach(([at, value], i) => context[i ? "lineTo" : "moveTo"](x(at), y(value)));
      context.strokeStyle = css(colour);
      context.lineWidth = 1.8;
      context.lineJoin = "round";
      context.stroke();
      context.lineTo(x(part[part.length - 1][0]), height);
      context.lineTo(x(part[0][0]), height);
      context.fillStyle = css(colour, 0.1);
      context.fill();
      if (this.joined) for (const [at, value] of part) dot(context, x(at), y(value), colour);
    }
  }
}

function dot(context, x, y, colour) {
  context.beginPath();
  context.arc(x, y, 2, 0, 7);
  context.fillStyle = css(colour);
  context.fill();
}

function unbroken(points) {
  const parts = [[]];
  for (const point of points) {
    if (point[1] == null) parts.push([]);
    else parts[parts.length - 1].push(point);
  }
  return parts.filter((part) => part.length);
}
