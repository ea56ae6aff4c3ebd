// Consumes a topic for a consumer group over HTTP: in a browser (consume.html) and in node 18 or newer, without any package.
//
//   node examples/consume.js http://127.0.0.1:8080 app.new_messages my-group
//
// A page of another origin than the broker needs LLOG_CORS_ORIGINS there. Delivery is at least once: a message that is not acknowledged
// within `visibilityMs` is delivered again, to any member of the group.

export class LlogError extends Error {
  constructor(problem) {
    super(problem.detail);
    this.code = problem.code; // stable: "topic_not_found", "overloaded", ...
    this.status = problem.status;
  }
}

export class Consumer {
  constructor(url, { topic, group, member = "js", start = "Earliest", limit = 100, waitMs = 10_000, visibilityMs = 60_000 }) {
    this.url = url.replace(/\/$/, "");
    this.topic = topic;
    this.group = group;
    this.name = member;
    this.rename();
    this.options = { start, limit, wait_ms: waitMs, visibility_ms: visibilityMs };
  }

  /** Goes on as a new member. An ack covers all that its member holds: what was not handled must be another's, and so comes again. */
  rename() {
    this.member = `${this.name}-${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  }

  /** Messages that nobody else in the group holds; none if nothing came within `waitMs`. */
  async consume(signal) {
    const asked = { topic: this.topic, group_id: this.group, member: this.member, ...this.options };
    try {
      return (await this.#post("/topics/consume", asked, signal)).messages;
    } catch (error) {
      this.rename(); // the broker may have answered, with messages that nobody got
      throw error;
    }
  }

  /** Acknowledges a message, and all before it that this consumer was given of the same partition. */
  async ack({ partition_id, offset }) {
    const asked = { topic: this.topic, group_id: this.group, member: this.member, partition_id, upto_offset: offset };
    return (await this.#post("/topics/ack", asked)).committed;
  }

  /** Gives a message back, to be delivered again after a while. */
  async release({ partition_id, offset }, delayMs = 0) {
    const asked = { topic: this.topic, group_id: this.group, member: this.member, partition_id, offset, delay_ms: delayMs };
    return (await this.#post("/topics/release", asked)).released;
  }

  /** Calls `handler` with each message until `signal` is aborted; what it throws at is delivered again. */
  async run(handler, { signal, retryMs = 1_000, onError = console.error } = {}) {
    while (!signal?.aborted) {
      try {
        for (const message of await this.consume(signal)) {
          const failed = await attempt(handler, message);
          if (failed === undefined) {
            await this.ack(message);
          } else {
            onError(failed);
            await this.release(message, retryMs * 2 ** Math.min(message.attempt - 1, 6));
          }
        }
      } catch (error) {
        if (signal?.aborted) return;
        if (error instanceof LlogError && error.status < 500 && error.status !== 429) throw error; // asking again will not help
        this.rename(); // the rest of the batch is not handled
        onError(error); // the broker cannot be reached, or is overloaded: it may come back
        await new Promise((resolve) => setTimeout(resolve, retryMs));
      }
    }
  }

  async #post(path, asked, signal) {
    const response = await fetch(this.url + path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(asked),
      signal,
    });
    const isProblem = response.headers.get("content-type")?.startsWith("application/problem+json");
    if (!response.ok && !isProblem) throw new Error(`${this.url}${path} answered ${response.status}, and not as a broker does`);
    const answer = await response.json();
    if (!response.ok) throw new LlogError(answer);
    return answer;
  }
}

/** What the handler threw, if it did. */
async function attempt(handler, message) {
  try {
    await handler(message);
    return undefined;
  } catch (error) {
    return error ?? new Error("the handler threw nothing");
  }
}

const isNode = typeof process !== "undefined" && process.versions?.node !== undefined;
if (isNode && process.argv[1] && import.meta.url === (await import("node:url")).pathToFileURL(process.argv[1]).href) {
  const [url, topic, group] = process.argv.slice(2);
  if (!group) {
    console.error("usage: node consume.js http://127.0.0.1:8080 TOPIC GROUP");
    process.exit(2);
  }
  const stop = new AbortController();
  process.once("SIGINT", () => stop.abort());
  process.once("SIGTERM", () => stop.abort());
  await new Consumer(url, { topic, group }).run((message) => console.log(JSON.stringify(message)), { signal: stop.signal });
}
