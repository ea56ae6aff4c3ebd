// Consumes a topic for a consumer group over HTTP, in a browser (consume.html) and in Node 18 or newer, without packages.
//
//   node examples/consume.js http://127.0.0.1:8080 app.new_messages my-group
//
// A page of another origin needs LLOG_CORS_ORIGINS on the broker. Delivery is at least once: a message that is not
// acknowledged within `visibilityMs` is delivered again, to any member of the group.

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

  /**
   * Continues as a new member. An ack covers all messages that its member holds; under a new name, those that were not
   * handled are not covered, and are delivered again.
   */
  rename() {
    this.member = `${this.name}-${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  }

  /** Returns messages that no other member of the group holds; none if nothing arrived within `waitMs`. */
  async consume(signal) {
    const body = { topic: this.topic, group_id: this.group, member: this.member, ...this.options };
    try {
      return (await this.#post("/topics/consume", body, signal)).messages;
    } catch (error) {
      this.rename(); // the broker may have delivered messages in an answer that was lost
      throw error;
    }
  }

  /** Acknowledges a message, and all earlier ones of its partition that were delivered to this consumer. */
  async ack({ partition_id, offset }) {
    const body = { topic: this.topic, group_id: this.group, member: this.member, partition_id, upto_offset: offset };
    return (await this.#post("/topics/ack", body)).committed;
  }

  /** Returns a message to the group, which delivers it again after `delayMs`. */
  async release({ partition_id, offset }, delayMs = 0) {
    const body = { topic: this.topic, group_id: this.group, member: this.member, partition_id, offset, delay_ms: delayMs };
    return (await this.#post("/topics/release", body)).released;
  }

  /** Calls `handler` with each message until `signal` is aborted. A message is delivered again if the handler throws. */
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
        if (error instanceof LlogError && error.status < 500 && error.status !== 429) throw error; // a retry would not help
        this.rename(); // the rest of the batch was not handled
        onError(error); // the broker is out of reach or overloaded, which may pass
        await new Promise((resolve) => setTimeout(resolve, retryMs));
      }
    }
  }

  async #post(path, body, signal) {
    const response = await fetch(this.url + path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    const isProblem = response.headers.get("content-type")?.startsWith("application/problem+json");
    if (!response.ok && !isProblem) throw new Error(`${this.url}${path} answered ${response.status}, but is not a broker`);
    const answer = await response.json();
    if (!response.ok) throw new LlogError(answer);
    return answer;
  }
}

/** Returns what the handler threw, or undefined. */
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
