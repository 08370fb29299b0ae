// One answer: streamed into the page, with what it cost.
import { stream } from "./api.js";
import { make, count, perSecond, plural, seconds } from "./dom.js";

export class Answer {
  constructor(asked) {
    this.text = make("div", { class: "text" });
    this.facts = make("p", { class: "facts" });
    const head = asked ? make("p", { class: "asked", text: asked }) : null;
    // Busy until it is whole: a screen reader then reads it once, and not word by word.
    const attributes = { class: "message assistant streaming", "aria-label": "The model", "aria-busy": "true" };
    this.element = make("article", attributes, head, this.text, this.facts);
    this.content = "";
  }

  /** Ask and show; the text, or null if there is none. */
  async fill(body, signal, onText) {
    const began = performance.now();
    let first = null;
    let usage = null;
    try {
      const request = { ...body, stream: true, stream_options: { include_usage: true } };
      for await (const part of stream("v1/chat/completions", request, signal)) {
        usage = part.usage ?? usage;
        const text = part.choices[0]?.delta?.content;
        if (!text) continue;
        first ??= performance.now();
        this.content += text;
        this.text.append(text);
        onText();
      }
      this.#tell(usage, began, first);
    } catch (error) {
      this.#fail(error);
      if (error.status === 401) throw error;
    } finally {
      this.element.classList.remove("streaming");
      this.element.removeAttribute("aria-busy");
      onText();
    }
    return this.content || null;
  }

  #tell(usage, began, first) {
    if (!usage) return;
    const taken = (performance.now() - (first ?? began)) / 1000;
    const told = [plural(usage.completion_tokens, "token")];
    if (usage.completion_tokens > 1) {
      told.push(`${perSecond((usage.completion_tokens - 1) / taken)} a second`);
    }
    if (first !== null) told.push(`the first after ${seconds((first - began) / 1000)}`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    told.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
    this.facts.textContent = told.join(" · ");
  }

  #fail(error) {
    const stopped = error.name === "AbortError";
    this.facts.textContent = stopped ? "Stopped." : error.message;
    this.facts.classList.toggle("error", !stopped);
  }
}
