// The conversation: what was said, what is being said, and what to say next.
import { Answer } from "./answer.js";
import { $, make } from "./dom.js";
import { QUESTIONS, SHARED } from "./examples.js";
import { settings } from "./settings.js";

export class Chat {
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.said = [];
    this.running = null; // an AbortController while an answer comes
    this.messages = $("messages");
    this.prompt = $("prompt");
    this.button = $("send");
    $("composer").addEventListener("submit", (event) => this.#submit(event));
    $("new-chat").addEventListener("click", () => {
      this.clear();
      this.prompt.focus({ preventScroll: true });
    });
    this.prompt.addEventListener("keydown", (event) => this.#onKey(event));
    this.prompt.addEventListener("input", () => this.#grow());
    this.clear();
  }

  clear() {
    this.running?.abort();
    this.said = [];
    this.messages.replaceChildren(this.#welcome());
  }

  #welcome() {
    const ask = (text) =>
      make("button", { type: "button", text, onclick: () => this.say(text) });
    const together = make(
      "button",
      { type: "button", id: "share", onclick: () => this.askTogether() },
      "Six questions about one text, at once",
      make("small", { text: "Watch them share its blocks in the cache." }),
    );
    return make(
      "div",
      { class: "welcome" },
      make("p", { class: "big", text: "Ask something." }),
      make("p", { text: "What is said here stays in the cache, and the next question finds it there." }),
      make("div", { class: "suggestions" }, together, ...QUESTIONS.map(ask)),
    );
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    } else if (event.key === "Escape") {
      this.running?.abort();
    }
  }

  #grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
  }

  #submit(event) {
    event.preventDefault();
    if (this.running) {
      this.running.abort();
      return;
    }
    const text = this.prompt.value.trim();
    if (!text) return;
    this.prompt.value = "";
    this.#grow();
    this.say(text);
  }

  async say(text) {
    if (this.running) return;
    this.#begin();
    this.said.push({ role: "user", content: text });
    this.#show(make("article", { class: "message user", "aria-label": "You" }, make("div", { class: "text", text })));
    const { system, asked } = settings();
    const messages = system ? [{ role: "system", content: system }, ...this.said] : this.said;
    const answer = new Answer();
    this.#show(answer.element);
    await this.#run(async (signal) => {
      const content = await answer.fill({ messages, ...asked }, signal, () => this.#follow());
      if (content) this.said.push({ role: "assistant", content });
      else this.said.pop(); // the question can be asked again
    });
  }

  /** Each question is a request of its own; they arrive together. */
  async askTogether() {
    if (this.running) return;
    this.#begin();
    const { asked } = settings();
    const body = { ...asked, max_tokens: Math.min(asked.max_tokens ?? 48, 48), temperature: 0 };
    await this.#run((signal) =>
      Promise.all(
        SHARED.questions.map((question) => {
          const answer = new Answer(question);
          this.#show(answer.element);
          const messages = [
            { role: "system", content: SHARED.system },
            { role: "user", content: question },
          ];
          return answer.fill({ ...body, messages }, signal, () => this.#follow());
        }),
      ),
    );
  }

  async #run(work) {
    this.running = new AbortController();
    this.button.textContent = "Stop";
    this.button.classList.add("stop");
    try {
      await work(this.running.signal);
    } catch (error) {
      if (error.status === 401) this.onUnauthorized(error);
      else throw error;
    } finally {
      this.running = null;
      this.button.textContent = "Send";
      this.button.classList.remove("stop");
    }
  }

  #begin() {
    this.messages.querySelector(".welcome")?.remove();
  }

  #show(element) {
    this.messages.append(element);
    this.messages.scrollTop = this.messages.scrollHeight;
  }

  /** Keep the end in sight, unless the reader has gone back. */
  #follow() {
    const { scrollTop, clientHeight, scrollHeight } = this.messages;
    if (scrollHeight - scrollTop - clientHeight < 120) this.messages.scrollTop = scrollHeight;
  }
}
