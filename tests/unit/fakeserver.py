"""A supervisor with a small server of ours in vLLM's place."""

import json
import os
import socket
import sys

from conftest import ROOT, python, runs, until

from fieldbook import processes

# What stands for vLLM: answers /health and /v1/models, has a worker in its session, and writes its start-up line.
FAKE = """
import http.server, json, os, subprocess, sys, time
worker = subprocess.Popen(["sleep", "300"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "smollm2-135m-instruct"}]}).encode() if self.path == "/v1/models" else b""
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = os.environ.get("FAKE_ANSWER") or json.dumps({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}})
        status = int(os.environ.get("FAKE_STATUS", 200))
        if status == 0: time.sleep(600)
        body = answer.encode()
        self.send_response(status); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
httpd = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("worker", worker.pid, os.environ.get("FAKE_ENV", ""), flush=True)
print("(APIServer pid=1) INFO:     Application startup complete.", flush=True)
httpd.serve_forever()
"""


class Supervised:
    """A supervisor with a fake server in a run folder; its owner is a process of the test's."""

    def __init__(self, spawned, run_dir, owner=None, argv=None, stop_timeout_s=1, env=None, **more):
        self.run_dir, self.owner = run_dir, owner or spawned(["sleep", "300"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (run_dir / "servers").mkdir(exist_ok=True)
        self.state_file = run_dir / "servers" / f"candidate-{self.port}.json"
        self.log = self.state_file.with_suffix(".log")
        state = {
            "status": "starting",
            "name": self.state_file.stem, "model": "smollm2-135m-instruct", "port": self.port, "owner": str(processes.identify(self.owner.pid)),
            "argv": [str(w) for w in argv or python(FAKE, self.port)], "env": {"FAKE_ENV": "given", **(env or {})},
            "log": str(self.log), "stop_timeout_s": stop_timeout_s, **more,
        }  # fmt: skip
        self.state_file.write_text(json.dumps(state))
        self.supervisor = spawned([sys.executable, "-m", "fieldbook.supervisor", str(self.state_file)], env={**os.environ, "PYTHONPATH": str(ROOT / "lib")})

    def state(self):
        return json.loads(self.state_file.read_text())

    def up(self):
        assert until(lambda: "complete" in (self.log.read_text() if self.log.exists() else "") and self.state()["status"] == "running"), self.state()
        words = self.log.read_text().split()
        self.worker, self.given = int(words[1]), words[2]
        self.server_pid = int(self.state()["server"].split(":")[0])
        assert runs(self.server_pid) and runs(self.worker)
        return self

    def gone(self, timeout_s=8):
        return until(lambda: not runs(self.server_pid) and not runs(self.worker), timeout_s)
