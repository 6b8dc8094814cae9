// Joins the parts: the address or the user changes the state, the library plans, the page shows the result.
"use strict";

class Page {
  constructor(library) {
    this.library = library;
    this.controls = new Controls(library.models(), (part) => this.set(part));
    this.chart = new Chart(document.getElementById("chart"));
    this.stage = new Stage(document.getElementById("stage"), document.getElementById("resident"));
    this.turn = 0; // the number of the shown plan
    this.setUpSteps();
    this.setUpCopy();
    document.getElementById("version").textContent = library.version();
    window.addEventListener("hashchange", () => this.showHash());
    new ResizeObserver(() => this.redraw()).observe(document.querySelector(".results"));
    matchMedia("(max-width: 30rem)").addEventListener("change", () => this.redraw());
    this.showHash();
  }

  showHash() {
    const state = stateFromHash(location.hash);
    const model = this.controls.models.find((known) => known.name === state.model);
    if (model) Object.assign(state, { vocab: model.vocab, hidden: model.hidden });
    else state.model = "";
    this.show(state);
  }

  // Applies a change by the user. The step goes back to 0 unless it is part of the change.
  set(part) {
    const state = { ...this.state, ...("step" in part ? {} : { step: 0 }), ...part };
    const hash = hashOfState(state);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    this.show(state);
  }

  show(state) {
    const planned = this.state && planArguments(state).join("\n") === planArguments(this.state).join("\n");
    this.state = state;
    this.controls.show(state);
    if (!planned) this.plan();
    if (this.result) {
      showMemory(state, this.result);
      this.showStep();
    }
    document.documentElement.dataset.shown = hashOfState(state);
  }

  plan() {
    const turn = ++this.turn;
    const { result, refusal } = this.library.plan(this.state);
    const note = document.getElementById("refusal");
    note.hidden = !refusal;
    note.textContent = refusal;
    document.querySelectorAll(".results section").forEach((section) => (section.hidden = !result));
    this.result = result;
    if (!result) document.getElementById("pinned-text").textContent = "refused";
    if (!result) return;
    this.points = [];
    this.measured = measuredFor(result.problem, result.device);
    showPlans(this.state, result);
    showMeasured(this.measured);
    this.redrawChart();
    computeCurve(this.library, this.state, result, () => turn !== this.turn, (points) => {
      this.points = points;
      this.redrawChart();
      document.documentElement.dataset.curve = String(points.length);
    });
  }

  redrawChart() {
    this.chart.draw(this.result, this.points, this.measured);
    document.getElementById("chart-note").textContent = "Circles are the plans of the table; the chosen one is filled." +
      (this.measured ? " Diamonds are measurements, filled for Logitless; the table below lists all of them." : "") +
      " The dashed line is the memory of materialized logits.";
  }

  redraw() {
    if (!this.result) return;
    this.redrawChart();
    this.showStep();
  }

  steps() {
    const { chosen, problem } = this.result;
    if (this.state.loop === "plain" || !chosen) return stepsOfPlainLoop(problem, this.state.chunk);
    return stepsOfPlan(this.result, chosen);
  }

  showStep() {
    const steps = this.steps();
    const plain = this.state.loop === "plain" || !this.result.chosen;
    const at = Math.min(this.state.step, steps.count - 1);
    const step = steps.at(at);
    document.getElementById("loop-plan").setAttribute("aria-pressed", String(!plain));
    document.getElementById("loop-plain").setAttribute("aria-pressed", String(plain));
    document.getElementById("loop-plan").disabled = !this.result.chosen;
    document.getElementById("step-text").textContent =
      plain ? step.text : `Step ${formatCount(at + 1)} of ${formatCount(steps.count)}. ${step.text}`;
    const slider = document.getElementById("step");
    slider.max = steps.count - 1;
    slider.value = at;
    slider.setAttribute("aria-valuetext", `step ${at + 1} of ${steps.count}`);
    document.getElementById("step-back").disabled = at === 0;
    document.getElementById("step-on").disabled = at + 1 >= steps.count;
    this.stage.draw(step, this.result.problem, plain ? null : this.result.chosen);
  }

  setUpSteps() {
    const at = (id) => document.getElementById(id);
    const move = (by) => this.set({ step: Math.min(Math.max(Number(at("step").value) + by, 0), Number(at("step").max)) });
    at("step").addEventListener("input", () => this.set({ step: at("step").valueAsNumber }));
    at("step-back").addEventListener("click", () => move(-1));
    at("step-on").addEventListener("click", () => move(1));
    at("loop-plan").addEventListener("click", () => this.set({ loop: "plan", step: 0 }));
    at("loop-plain").addEventListener("click", () => this.set({ loop: "plain", step: 0 }));
    let timer = null;
    const stop = () => {
      clearInterval(timer);
      timer = null;
      at("play").textContent = "Play";
    };
    at("play").addEventListener("click", () => {
      if (timer !== null) return stop();
      const count = Number(at("step").max) + 1;
      const by = Math.max(Math.round(count / 60), 1); // long runs skip steps
      if (Number(at("step").value) + 1 >= count) this.set({ step: 0 });
      at("play").textContent = "Stop";
      timer = setInterval(() => {
        move(by);
        if (Number(at("step").value) >= Number(at("step").max)) stop();
      }, 400);
    });
  }

  setUpCopy() {
    const button = document.getElementById("copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(document.getElementById("command").textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(document.getElementById("command"));
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }
}

Library.load().then(
  (library) => {
    window.planner = new Page(library);
  },
  (error) => {
    const note = document.getElementById("failure");
    note.hidden = false;
    note.textContent = typeof createLogitlessPlanner === "undefined"
      ? "This is the page's source, without the planner. ./scripts/planner builds both into build/planner/page."
      : `The planner could not be started: ${error}. It needs a browser of 2022 or later, with WebAssembly and its exceptions.`;
  },
);
