"""What vLLM is doing while it starts, from the lines of its log. It is silent for minutes while it compiles."""

from __future__ import annotations

# In the order of a start. A line that holds one of the words begins the stage; later stages are never left for earlier.
_STAGES = (
    ("starting (imports take some seconds)", ()),
    ("setting up the engine", ("Initializing a V1 LLM engine", "Initializing an LLM engine")),
    ("loading weights", ("Starting to load model", "Loading safetensors", "Loading weights")),
    (
        "warming up; compiling takes minutes at a first start (--enforce-eager leaves it out)",
        ("Warming up model", "Warming up", "torch.compile", "Dynamo bytecode", "Compiling a graph"),
    ),
    ("capturing CUDA graphs", ("Capturing CUDA graphs", "Graph capturing")),
    ("starting the HTTP server", ("Starting vLLM", "Started server process", "Waiting for application startup")),
)


# A server says the first, a node without one the second.
_UP = ("Application startup complete", "headless multiproc executor", "in headless mode")


class Stages:
    """Listens to vLLM's log. `is_up`: it has said that it is ready, whether or not it can be asked."""

    def __init__(self) -> None:
        self._number = 0
        self.is_up = False

    @property
    def now(self) -> str:
        """What vLLM does, in a few words."""
        return f"vLLM: {_STAGES[self._number][0]}"

    def hear(self, line: str) -> None:
        """One more line of the log."""
        self.is_up = self.is_up or any(words in line for words in _UP)
        for number in range(len(_STAGES) - 1, self._number, -1):
            if any(word in line for word in _STAGES[number][1]):
                self._number = number
                return
