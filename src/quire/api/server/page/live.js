// From the server's counters to curves: what has been added between two looks, by the second.
import { Curve } from "./curves.js";
import { $, count, perSecond, seconds } from "./dom.js";

const percent = (value) => `${Math.round(value * 100)} %`;
const TIERS = [["device", "prefill"], ["host", "loading"], ["ssd", "decode"], ["remote", "preempted"]];
const SMOOTH_S = 4; // rates are over this long, so that they can be read

export class Live {
  constructor() {
    this.seen = [];
    this.firstToken = 0; // the time of the last one shown
    this.speed = new Curve("Tokens a second", [["generated", "decode"], ["prompt", "prefill"]], perSecond, { top: 5 });
    this.load = new Curve("Requests", [["running", "used"], ["waiting", "shared"]], count, { top: 2 });
    this.hits = new Curve("Prompt tokens found", TIERS, percent, { top: 1, joined: true });
    this.first = new Curve("Time to first token", [["median", "loading"]], seconds, { top: 0.05, joined: true });
    $("curves").append(...[this.speed, this.load, this.hits, this.first].map((curve) => curve.element));
  }

  clear() {
    this.seen = [];
    for (const curve of [this.speed, this.load, this.hits, this.first]) curve.clear();
  }

  show(state) {
    this.seen.push(state);
    while (this.seen.length > 2 && this.seen[1].now <= state.now - SMOOTH_S) this.seen.shift();
    const before = this.seen[0];
    const passed = state.now - before.now || 1;
    const rate = (read) => Math.max(0, read(state) - read(before)) / passed;
    const generated = rate((each) => each.tokens.generated);
    this.speed.add(state.now, { generated, prompt: rate((each) => each.tokens.computed - each.tokens.generated) });
    const waiting = state.requests.waiting + state.requests.loading;
    this.load.add(state.now, { running: state.requests.running, waiting });
    this.hits.add(state.now, hitRates(state, before));
    this.first.add(state.now, { median: this.#firstTokens(state) });
    this.#pulse(state, generated, waiting);
  }

  /** The median of those that have come since the last look. */
  #firstTokens(state) {
    const fresh = state.first_tokens.filter(([at]) => at > this.firstToken);
    if (!fresh.length) return null;
    this.firstToken = Math.max(...fresh.map(([at]) => at));
    const sorted = fresh.map(([, value]) => value).sort((a, b) => a - b);
    return sorted[Math.floor(sorted.length / 2)];
  }

  #pulse(state, generated, waiting) {
    const parts = [];
    if (state.requests.running) parts.push(`${state.requests.running} running`);
    if (waiting) parts.push(`${waiting} waiting`);
    if (generated >= 0.05) parts.push(`${perSecond(generated)} tokens/s`);
    const pulse = $("pulse");
    pulse.classList.remove("lost");
    pulse.ariaLive = "off";
    pulse.textContent = parts.join(" · ") || "idle";
  }
}

/** Of the prompt tokens that came, how many each tier had; nothing while none come. */
function hitRates(state, before) {
  const asked = state.prefix.queries - before.prefix.queries;
  const rates = {};
  for (const [tier] of TIERS) {
    const now = state.prefix.hits_by_tier[tier];
    const known = now !== undefined || tier === "device";
    if (known) rates[tier] = asked > 0 ? ((now ?? 0) - (before.prefix.hits_by_tier[tier] ?? 0)) / asked : null;
  }
  return rates;
}
