"""A server to be measured: one that Fieldbook launched, or any vLLM server that is already up."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .. import server
from ..errors import BadInput, GateFailed

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Target:
    """Address without a path, the served model's name, the key that it asks for ('' for none), and its longest request in tokens."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    max_model_len: int | None = None

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, so that clocks and load of this machine are its own."""
        return re.match(r"http://(127\.0\.0\.1|localhost|\[::1\])(:|$)", self.url) is not None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> str:
        """Text of a GET. Raises GateFailed when nothing, or an error, comes back."""
        return self._asked("GET", path, None, timeout_s).text

    def post(self, path: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """JSON object of a POST. Raises GateFailed for anything but status 200 with a JSON object."""
        return server.object_of(self._asked("POST", path, body, timeout_s), self.url + path)

    def _asked(self, method: str, path: str, body: Any, timeout_s: float):
        import httpx

        try:
            # Never through a proxy of the environment: it would get the key, and be measured.
            answer = httpx.request(method, self.url + path, json=body, timeout=timeout_s, headers=self.headers, trust_env=False)
        except httpx.HTTPError as error:
            raise GateFailed(f"{self.url} does not answer: {type(error).__name__}") from None
        return server.sound(answer, self.url + path, self.api_key)


def of_state(state: dict[str, Any]) -> Target:
    """The target of a server that Fieldbook launched, by its state."""
    return Target(server.url(state), state["model"], server.api_key(state))


def of_url(base_url: str, api_key: str = "", model: str = "") -> Target:
    """The target behind an address, asked for what it serves; `model` picks one of several. Raises BadInput for a wrong address, GateFailed for no answer."""
    url = base_url.rstrip("/").removesuffix("/v1")
    if not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s?#@]*)?", url):
        raise BadInput("--base-url: expected http://HOST:PORT, without a key or a query in it")
    asked = Target(url, model, api_key)
    try:
        served = json.loads(asked.get("/v1/models"))["data"]
        names = {entry["id"]: entry.get("max_model_len") for entry in served}
    except (ValueError, KeyError, TypeError):
        raise GateFailed(f"{url}/v1/models does not list models as vLLM does") from None
    if model and model not in names:
        raise BadInput(f"--model: {model} is not served at {url}, which has {', '.join(names)}")
    if not model and len(names) != 1:
        raise BadInput(f"--model: {url} serves {', '.join(names) or 'no model'}; name one of them")
    name = model or next(iter(names))
    return Target(url, name, api_key, names[name])


def count_tokens(target: Target, **asked: Any) -> int:
    """Tokens of `prompt=TEXT` or `messages=CHAT` as the server itself counts them (/tokenize). Raises GateFailed where it does not tell."""
    count = target.post("/tokenize", {"model": target.model, **asked}).get("count")
    if not isinstance(count, int):
        raise GateFailed(f"{target.url}/tokenize gives no count")
    return count
