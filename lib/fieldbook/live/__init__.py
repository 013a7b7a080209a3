"""What runs inside the server's own processes, and the question and answers that go there and back as files."""

from .asking import Answer, ask, plant, write_plugin

__all__ = ["Answer", "ask", "plant", "write_plugin"]
