// The last requests, each with its story behind it.
import { css, ofRequest, onChange } from "./colours.js";
import { $, count, isTouched, make, plural, seconds } from "./dom.js";
import { said, stages } from "./story.js";

const MOST = 40;
const KINDS = {
  queued: "queued", "taken back": "queued", matched: "prefill", resumed: "prefill", prefill: "prefill",
  loaded: "loading", "first token": "decode", decode: "decode", forked: "decode", copied: "decode",
  preempted: "preempted", finished: "done",
};

export class Stories {
  /** `onLight` is told whose blocks should stand out, or null. */
  constructor(onLight) {
    this.onLight = onLight;
    this.list = $("stories");
    this.rows = new Map();
    this.seesAll = true;
    onChange(() => this.rows.forEach((row) => row.colour()));
    this.#tellNumber();
  }

  /** Stories that are new or have changed, the latest first. */
  show(told) {
    for (const story of [...told].reverse()) {
      const key = `${story.id} ${story.number}`;
      if (!this.rows.has(key)) {
        const row = new Row(this.onLight);
        this.rows.set(key, row);
        this.list.prepend(row.element);
      }
      this.rows.get(key).show(story);
    }
    while (this.rows.size > MOST) {
      const [key, row] = this.rows.entries().next().value;
      row.element.remove();
      this.rows.delete(key);
    }
    if (told.length) this.#tellNumber();
  }

  clear() {
    for (const row of this.rows.values()) row.element.remove();
    this.rows.clear();
    this.onLight(null);
    this.#tellNumber();
  }

  #tellNumber() {
    const how = isTouched.matches ? "Tap one for its story." : "Open one for its story; point at it to see its blocks.";
    const says = this.rows.size ? how : "None yet.";
    $("requests-hint").textContent = this.seesAll ? says : `${says} Only your own are shown.`;
  }
}

class Row {
  constructor(onLight) {
    this.dot = make("i", { class: "dot" });
    this.preview = make("span", { class: "preview" });
    this.sizes = make("span", { class: "sizes" });
    this.hit = make("span", { class: "hit", role: "img" });
    this.when = make("span", { class: "when" });
    this.told = make("div", { class: "told" });
    const summary = make("summary", {}, this.dot, this.preview, this.sizes, this.hit, this.when);
    this.element = make("details", { class: "story" }, summary, this.told);
    this.element.addEventListener("toggle", () => this.#tell());
    for (const event of ["pointerenter", "focusin"]) {
      this.element.addEventListener(event, () => onLight(this.isRunning ? this.story.id : null));
    }
    for (const event of ["pointerleave", "focusout"]) this.element.addEventListener(event, () => onLight(null));
  }

  get isRunning() {
    return !this.story.finish_reason;
  }

  show(story) {
    this.story = story;
    this.colour();
    this.element.classList.toggle("running", this.isRunning);
    this.preview.textContent = question(story.preview) || `Request ${story.id}`;
    this.preview.title = story.name;
    const sizes = `${count(story.prompt_tokens)} → ${count(story.output_tokens)} tokens`;
    this.sizes.textContent = story.adapter ? `${story.adapter} · ${sizes}` : sizes;
    this.#showHits(story);
    this.when.textContent = this.isRunning ? this.#status() : seconds(this.#took());
    this.#tell();
  }

  colour() {
    if (this.story) this.dot.style.background = css(ofRequest(this.story.number));
  }

  #took() {
    const { events } = this.story;
    return events[events.length - 1].at;
  }

  #status() {
    return this.story.now?.find(({ status }) => status !== "finished")?.status ?? "waiting";
  }

  #showHits(story) {
    const found = Object.entries(story.cached_tokens_by_tier);
    const total = found.reduce((sum, [, tokens]) => sum + tokens, 0);
    this.hit.replaceChildren(
      ...found.map(([tier, tokens]) => {
        const part = make("i", { class: `tier-${tier}` });
        part.style.width = `${(tokens / story.prompt_tokens) * 100}%`;
        return part;
      }),
    );
    const says = `${count(total)} of ${count(story.prompt_tokens)} prompt tokens were cached`;
    this.hit.setAttribute("aria-label", says);
    this.hit.title = says;
  }

  /** Written only while it is open. */
  #tell() {
    if (!this.element.open) return;
    const { story } = this;
    const items = story.events.map((event) => this.#event(event));
    if (story.omitted) {
      const gap = make("li", { class: "gap", text: `… ${plural(story.omitted, "event")} left out` });
      items.splice(Math.ceil(items.length / 2), 0, gap);
    }
    this.told.replaceChildren(
      this.#timeline(),
      make("ol", { class: "events" }, ...items),
      ...(story.error ? [make("p", { class: "error", text: story.error })] : []),
    );
  }

  #timeline() {
    const parts = stages(this.story, Date.now() / 1000 - this.story.arrived);
    const says = parts.map(({ stage, seconds: time }) => `${stage} ${seconds(time)}`).join(", ");
    const bar = make("div", { class: "timeline", role: "img", "aria-label": says, title: says });
    for (const { stage, seconds: time } of parts) {
      const part = make("i", { class: `stage-${stage}` });
      part.style.flex = `${time} 0 0`;
      bar.append(part);
    }
    return bar;
  }

  #event(event) {
    const stage = event.sample ? `${event.stage} (${event.sample + 1})` : event.stage;
    const change = make("span", { class: "change" });
    if (event.shared) change.append(make("span", { class: "shared", text: `${count(event.shared)} shared` }));
    if (event.taken) change.append(make("span", { class: "taken", text: `+${count(event.taken)}` }));
    if (event.given_back) change.append(make("span", { class: "back", text: `−${count(event.given_back)}` }));
    change.title = "Blocks of its table: shared, taken, given back";
    return make(
      "li",
      {},
      make("time", { text: seconds(event.at) }),
      make("span", { class: `stage ${KINDS[event.stage] ?? ""}`, text: stage }),
      make("span", { class: "what", text: said(event, this.story) }),
      change,
      pool(event.pool),
    );
  }
}

/** The last thing said to the model, as far as its chat template lets it be seen. */
function question(prompt) {
  const last = prompt.match(/(?:^|\n)\s*user\s*\n+([\s\S]*)$/)?.[1] ?? prompt;
  return last.replace(/\s*assistant\s*$/, "").replace(/\s+/g, " ").trim();
}

function pool([free, cached, inUse]) {
  const total = free + cached + inUse || 1;
  const says = `the pool then: ${count(free)} free, ${count(cached)} cached, ${count(inUse)} in use`;
  const bar = make("span", { class: "pool", role: "img", "aria-label": says, title: says });
  for (const [name, part] of [["in-use", inUse], ["cached", cached]]) {
    const piece = make("i", { class: name });
    piece.style.width = `${(part / total) * 100}%`;
    bar.append(piece);
  }
  return bar;
}
