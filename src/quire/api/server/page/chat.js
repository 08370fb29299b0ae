// The conversation: what was said, what is being said, and what to say next.
import { Answer } from "./answer.js";
import { $, make } from "./dom.js";
import { QUESTIONS, SHARED } from "./examples.js";
import { Question } from "./question.js";
import { settings } from "./settings.js";

const KEY = "quire-chat"; // in the tab's storage: a reload keeps the conversation, closing forgets it

export class Chat {
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.turns = []; // questions and answers by turns
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
    addEventListener("pagehide", () => this.#keep()); // also what has come of an answer so far
    this.#restore();
  }

  clear() {
    this.running?.abort();
    this.#drop(0);
    this.messages.replaceChildren(this.#welcome());
    this.#keep();
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
    this.#add(this.#question(text));
    await this.#answer();
  }

  #question(text) {
    const question = new Question(text, (changed) => {
      if (this.running) return;
      this.#drop(this.turns.indexOf(question));
      this.say(changed);
    });
    return question;
  }

  /** What was asked last is asked once more, and this answer and all behind it are forgotten. */
  #retry(answer) {
    if (this.running) return;
    this.#drop(this.turns.indexOf(answer));
    this.#answer();
    this.prompt.focus({ preventScroll: true }); // the button is gone
  }

  async #answer() {
    const { system, asked } = settings();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#said()];
    const answer = new Answer({ onRetry: () => this.#retry(answer) });
    this.#add(answer);
    await this.#run((signal) => answer.fill({ messages, ...asked }, signal, () => this.#follow()));
  }

  /** The conversation as the model is told it: a question that was not answered is left out. */
  #said() {
    const said = [];
    for (const { role, content } of this.turns.map((turn) => turn.kept())) {
      if (role === "user" && said.at(-1)?.role === "user") said.pop();
      if (content) said.push({ role, content });
    }
    return said;
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
          const answer = new Answer({ asked: question });
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
    const running = new AbortController();
    this.running = running;
    this.button.textContent = "Stop";
    this.button.classList.add("stop");
    try {
      await work(running.signal);
    } catch (error) {
      if (error.status === 401) this.onUnauthorized(error);
      else throw error;
    } finally {
      this.running = null;
      this.button.textContent = "Send";
      this.button.classList.remove("stop");
      this.#keep();
    }
  }

  #begin() {
    this.messages.querySelector(".welcome")?.remove();
  }

  #add(turn) {
    this.turns.push(turn);
    this.#show(turn.element);
  }

  /** Forget the turns from a place on. */
  #drop(place) {
    for (const turn of this.turns.splice(place)) turn.element.remove();
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

  #keep() {
    try {
      sessionStorage.setItem(KEY, JSON.stringify(this.turns.map((turn) => turn.kept())));
    } catch {
      sessionStorage.removeItem(KEY); // it is too long to be kept
    }
  }

  #restore() {
    let kept = [];
    try {
      kept = JSON.parse(sessionStorage.getItem(KEY)) ?? [];
    } catch {
      // written by another page
    }
    if (kept.length === 0) {
      this.clear();
      return;
    }
    for (const each of kept) {
      if (each.role === "user") this.#add(this.#question(each.content));
      else {
        const answer = Answer.restored(each, { onRetry: () => this.#retry(answer) });
        this.#add(answer);
      }
    }
  }
}
