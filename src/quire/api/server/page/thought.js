// What a model thinks before it answers, folded: a line that says how long, and the text behind it.
import { make, seconds } from "./dom.js";

export class Thought {
  constructor() {
    this.text = "";
    this.summary = make("summary", { text: "Thinking …" });
    this.words = make("div", { class: "words" });
    this.element = make("details", { class: "thought", hidden: true }, this.summary, this.words);
    this.began = null;
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
    this.summary.textContent = `Thought for ${seconds((performance.now() - this.began) / 1000)}`;
    this.began = null;
  }

  restore(text) {
    this.text = text;
    this.words.textContent = text;
    this.element.hidden = text === "";
    this.summary.textContent = "Thought";
  }
}
