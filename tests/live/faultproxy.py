"""A proxy in front of a real server that does one thing wrong, for the tests of what a client must notice."""

import http.server
import json
import threading
import time

import httpx


def chunks_of(stream):
    """The server-sent events of a stream, one by one, as bytes without their blank lines."""
    left = b""
    for raw in stream.iter_bytes():
        *whole, left = (left + raw).split(b"\n\n")
        yield from (event for event in whole if event.strip())
    if left.strip():
        yield left


def edited(event, change):
    """An event whose document `change` has edited in place; [DONE] stays."""
    text = event.removeprefix(b"data: ")
    if text == b"[DONE]":
        return event
    document = json.loads(text)
    change(document)
    return b"data: " + json.dumps(document).encode()


def tokens_more(document, key="completion_tokens", more=1):
    if document.get("usage"):
        document["usage"][key] += more


def text_twice(document):
    for choice in document.get("choices", []):
        choice["text"] = 2 * (choice.get("text") or "")


def events_with_fault(events, fault):
    """The events of a completion stream with one fault; None where the connection breaks."""
    for number, event in enumerate(events):
        has_token = b'"choices":[{' in event
        if fault == "slow":
            time.sleep(0.08)
        if fault == "truncates" and has_token and number % 2:
            continue
        if fault == "drops" and number == 1:
            yield None
            return
        event = edited(event, lambda document: tokens_more(document)) if fault == "lies in usage" else event
        event = edited(event, lambda document: tokens_more(document, "prompt_tokens")) if fault == "lies about the prompt" else event
        event = edited(event, text_twice) if fault == "doubles the text" else event
        yield event
        if fault == "repeats" and has_token:
            yield event


class FaultProxy:
    """A proxy on a free port; `fault` may be changed while it runs. Only completions are touched, so that the server's own counters come through."""

    def __init__(self, base_url):
        proxy = self
        self.fault, self.base_url, self.seen = "", base_url, {}
        self.client = httpx.Client(timeout=120, trust_env=False)

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                answer = proxy.client.get(proxy.base_url + self.path)
                self.reply(answer.status_code, answer.content)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fault = proxy.fault if self.path.endswith("completions") else ""
                if fault == "empty 200":
                    return self.reply(200, b"")
                if fault == "500":
                    return self.reply(500, b"no")
                if fault == "one prompt for all" and json.loads(body).get("stream"):
                    document = json.loads(body)
                    first = proxy.seen.setdefault(document["max_tokens"], document["prompt"])
                    body = json.dumps({**document, "prompt": first}).encode()
                if fault == "delays":
                    time.sleep(0.3)
                if json.loads(body).get("stream"):
                    return self.stream(body, fault)
                answer = proxy.client.post(proxy.base_url + self.path, content=body, headers={"Content-Type": "application/json"})
                content = answer.content
                if fault and self.path.endswith("chat/completions"):
                    document = json.loads(content)
                    proxy.edit_answer(document)
                    content = json.dumps(document).encode()
                return self.reply(answer.status_code, content)

            def stream(self, body, fault):
                with proxy.client.stream("POST", proxy.base_url + self.path, content=body, headers={"Content-Type": "application/json"}) as answer:
                    self.send_response(answer.status_code)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Connection", "close")
                    self.end_headers()
                    for event in events_with_fault(chunks_of(answer), fault):
                        if event is None:
                            break
                        self.wfile.write(event + b"\n\n")
                        self.wfile.flush()
                self.close_connection = True

            def reply(self, status, content):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}"
        threading.Thread(target=self.httpd.serve_forever, daemon=True).start()

    def edit_answer(self, document):
        """A chat answer with the fault."""
        choice = document["choices"][0]
        if self.fault == "lies in usage":
            tokens_more(document)
        if self.fault == "repeats":
            choice["message"]["content"] = "I will look again. " * 20
            choice["finish_reason"] = "length"
        if self.fault == "truncates":
            choice["message"]["content"] = ""
        if self.fault == "ends twice":
            choice["token_ids"] = [2, *choice["token_ids"][1:-1], 2]
            choice["finish_reason"] = "stop"

    def close(self):
        self.httpd.shutdown()
        self.httpd.server_close()
        self.client.close()
