"""The built-in prompts: short beginnings for greedy decoding, and some whose next words are a toss-up for sampling."""

from __future__ import annotations

GREEDY = (
    "def is_palindrome(text):\n",
    "The three largest planets of the solar system are",
    "Q: How do I boil an egg?\nA:",
    "Shopping list:\n- bread\n- milk\n-",
    "class Stack:\n    def __init__(self):\n",
    "Water freezes at zero degrees, and it boils at",
    "User: I slept badly and have an exam today. What should I do?\nAssistant:",
    "Colours of the rainbow, in order: red,",
    "SELECT name, price FROM products WHERE",
    "The capital of France is Paris. The capital of Italy is",
    "Dear neighbour,\nthank you for",
    "Steps to plant a tree:\n1. Dig a hole.\n2.",
    "for (int i = 0; i < n; i++) {\n",
    "The heart pumps blood through the body, while the lungs",
    "User: Tell me a joke about cats.\nAssistant:",
    "Months with thirty days: April,",
    "import json\n\nwith open('data.json') as file:\n",
    "Once upon a time, at the edge of a dark forest,",
    "Q: Why is the sky blue?\nA: Because",
    "2, 4, 8, 16, 32,",
    "<html>\n<head>\n<title>",
    "A triangle has three sides, a square has four, and a hexagon has",
    "User: Which is heavier, a kilogram of iron or a kilogram of feathers?\nAssistant:",
    "Ingredients for pancakes:\n* flour\n*",
    "fn main() {\n    let mut total = 0;\n",
    "In winter the days are short, because the Earth",
    "To whom it may concern: I am writing to",
    "Monday, Tuesday, Wednesday,",
    "# Counts the words of a file\ndef count_words(path):\n",
    "The opposite of hot is cold, the opposite of early is",
    "User: Please translate 'good morning' into Spanish.\nAssistant:",
    "Reasons to learn a second language:\n1.",
)

# Short: whenever two samples differ, the draft prefills one of them from its start.
COIN = "Coin tosses: heads, tails, tails, heads, tails, heads, heads, tails,"

WEATHER = "Weather: sun, rain, cloud, sun, rain, rain, cloud, sun,"

TOSSES = "".join(
    f'{{"coin": "{coin}", "won": {won}}}\n'
    for coin, won in (("heads", "true"), ("tails", "true"), ("heads", "false"), ("tails", "false"))
)

TOSS_KEYS = ("coin", "won")
TOSS_SCHEMA = {
    "type": "object",
    "properties": {"coin": {"enum": ["heads", "tails"]}, "won": {"type": "boolean"}},
    "required": list(TOSS_KEYS),
    "additionalProperties": False,
}


def greedy_prompts(count: int) -> list[str]:
    """That many prompts; beyond the built-in ones they are repeated, each with one more space at its end."""
    return [GREEDY[index % len(GREEDY)] + " " * (index // len(GREEDY)) for index in range(count)]
