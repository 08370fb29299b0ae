// One answer: streamed into the page, with what it cost.
import { stream } from "./api.js";
import { copyButton } from "./copy.js";
import { make, count, perSecond, plural, seconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { Thought } from "./thought.js";

const TIERS = { host: "host memory", ssd: "SSD", remote: "the remote store" };

export class Answer {
  /** `asked` is shown above it; `onRetry` is what a button below it does. */
  constructor({ asked = null, onRetry = null } = {}) {
    this.thought = new Thought();
    this.text = make("div", { class: "text" });
    this.cut = make("p", { class: "cut", hidden: true });
    this.facts = make("p", { class: "facts" });
    this.actions = make("div", { class: "actions" }, copyButton("Copy this answer", () => this.content));
    if (onRetry) {
      const name = "Ask again for this answer";
      const retry = { type: "button", class: "action retry", "aria-label": name, title: name, text: "Retry" };
      this.actions.append(make("button", { ...retry, onclick: onRetry }));
    }
    const head = asked ? make("p", { class: "asked", text: asked }) : null;
    const foot = make("div", { class: "foot" }, this.facts, this.actions);
    this.element = make(
      "article",
      { class: "message assistant", "aria-label": "The model" },
      head,
      this.thought.element,
      this.text,
      this.cut,
      foot,
    );
    this.view = new MarkdownView(this.text);
    this.content = "";
    this.finish = null;
    this.drawing = 0;
  }

  /** An answer of an earlier visit. */
  static restored(kept, options) {
    const answer = new Answer(options);
    answer.content = kept.content;
    answer.thought.restore(kept.thought, kept.took ?? null);
    answer.#end(kept.finish);
    answer.facts.textContent = kept.facts;
    return answer;
  }

  /** What `restored` needs. */
  kept() {
    const { content, finish } = this;
    const facts = this.facts.textContent || "Stopped."; // by a reload, if there are none yet
    const { text: thought, took } = this.thought;
    return { role: "assistant", content, thought, took, finish, facts };
  }

  /** Ask and show; whether there is an answer. */
  async fill(body, signal, onText) {
    // Busy until it is whole: a screen reader then reads it once, and not word by word.
    this.element.classList.add("streaming");
    this.element.setAttribute("aria-busy", "true");
    const began = performance.now();
    let first = null;
    let usage = null;
    let finish = null;
    try {
      const request = { ...body, stream: true, stream_options: { include_usage: true } };
      for await (const part of stream("v1/chat/completions", request, signal)) {
        usage = part.usage ?? usage;
        const [choice] = part.choices;
        finish = choice?.finish_reason ?? finish;
        const { content, reasoning_content: thought } = choice?.delta ?? {};
        if (!content && !thought) continue;
        first ??= performance.now();
        if (thought) this.thought.add(thought);
        if (content) this.#add(content);
        onText();
      }
      this.#tell(usage, began, first, body.model);
    } catch (error) {
      finish = "stopped";
      this.#fail(error);
      if (error.status === 401) throw error;
    } finally {
      this.#end(finish);
      this.element.classList.remove("streaming");
      this.element.removeAttribute("aria-busy");
      onText();
    }
    return this.content !== "" || this.thought.text !== "";
  }

  /** Drawn once a frame: tokens may come faster. */
  #add(text) {
    this.thought.end();
    this.content += text;
    this.drawing ||= requestAnimationFrame(() => {
      this.drawing = 0;
      this.view.show(this.content);
    });
  }

  #end(finish) {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    this.finish = finish;
    this.thought.end();
    this.view.show(this.content);
    this.cut.hidden = finish !== "length";
    this.cut.textContent = "The answer was cut off: it has reached Max tokens, which Settings can raise, or the model's length.";
  }

  /** `model` is the one that was chosen, where there are several. */
  #tell(usage, began, first, model) {
    if (!usage) return;
    const taken = (performance.now() - (first ?? began)) / 1000;
    const told = [...(model ? [model] : []), plural(usage.completion_tokens, "token")];
    if (usage.completion_tokens > 1) {
      told.push(`${perSecond((usage.completion_tokens - 1) / taken)} a second`);
    }
    if (first !== null) told.push(`the first after ${seconds((first - began) / 1000)}`);
    const { cached_tokens: cached = 0, cached_tokens_by_tier: tiers = {} } = usage.prompt_tokens_details ?? {};
    const below = Object.entries(TIERS).filter(([tier]) => tiers[tier]);
    const from = below.map(([tier, name]) => `${count(tiers[tier])} from ${name}`).join(", ");
    told.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached${from && `, ${from}`}`);
    this.facts.textContent = told.join(" · ");
  }

  #fail(error) {
    const stopped = error.name === "AbortError";
    this.facts.textContent = stopped ? "Stopped." : error.message;
    this.facts.classList.toggle("error", !stopped);
  }
}
