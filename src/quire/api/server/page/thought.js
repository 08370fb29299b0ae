// What a model thinks before it answers, folded: a line that says how long, and the text behind it.
import { make, seconds } from "./dom.js";

export class Thought {
  constructor() {
    this.text = "";
    this.summary = make("summary", { text: "Thinking …" });
    this.words = make("div", { class: "words" });
    this.element = make("details", { class: "thought", hidden: true }, this.summary, this.words);
    this.began = null;
    this.took = null; // seconds, once it is known
  }

  add(text) {
    this.began ??= performance.now();
    this.element.hidden = false;
    this.text += text;
    this.words.append(text);
  }

  /** Words have come, or the answer has ended. */
  end() {
    if (this.began === null) return;
    this.took = (performance.now() - this.began) / 1000;
    this.summary.textContent = `Thought for ${seconds(this.took)}`;
    this.began = null;
  }

  restore(text, took) {
    this.text = text;
    this.took = took;
    this.words.textContent = text;
    this.element.hidden = text === "";
    this.summary.textContent = took === null ? "Thought" : `Thought for ${seconds(took)}`;
  }
}
