// The library: runs `logitless plan` as WebAssembly, with the arguments that a shell would pass.
"use strict";

// Returns the arguments for a state.
function planArguments(state) {
  const words = ["plan"];
  if (state.model) words.push("--model", state.model);
  else words.push("--vocab", String(state.vocab), "--hidden", String(state.hidden));
  words.push("--tokens", String(state.tokens), "--dtype", state.dtype);
  const [device, kernels] = state.device.split(":");
  words.push("--device", device);
  if (device === "cpu") {
    // fp64 runs on the reference backend, which has no engines.
    if (state.dtype !== "f64") words.push("--backend", `cpu:${kernels}`);
    words.push("--threads", String(state.threads));
  }
  if (state.pass === "loss") words.push("--no-grad");
  else if (state.gradient !== "exact") words.push("--gradient", state.gradient, "--threshold", state.threshold);
  if (state.budget) words.push("--budget", state.budget);
  return words;
}

// Quotes words for a shell.
function commandText(words) {
  return ["logitless", ...words].map((word) => (/^[\w.:=^-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");
}

class Library {
  static async load() {
    const module = await createLogitlessPlanner();
    return new Library((lines) => module.ccall("logitless_planner", "string", ["string"], [lines]));
  }

  constructor(call) {
    this.call = call;
  }

  // Runs the command line; returns {code, out, err}.
  run(words) {
    return JSON.parse(this.call(words.join("\n")));
  }

  // Returns {result, refusal}: the output of `--json`, or null; and the error message, or "".
  plan(state) {
    const { out, err } = this.run([...planArguments(state), "--json"]);
    const refusal = err.replace(/^logitless: error: /, "").trim();
    return { result: out ? JSON.parse(out) : null, refusal };
  }

  models() {
    return JSON.parse(this.run(["plan", "--list-models", "--json"]).out);
  }

  version() {
    return this.run(["--version"]).out.replace(/^logitless /, "").trim();
  }
}
