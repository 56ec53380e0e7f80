"""What is asked when nothing is asked: short and long prompts with short and long answers, raw texts and chats.

Lengths are mixed on purpose. Some requests leave after a few tokens, so that their slots are seen to be taken again
while the long ones go on.
"""

from typing import Any

MOBY_DICK = """Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my \
purse, and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part \
of the world. It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself \
growing grim about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily \
pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos \
get such an upper hand of me, that it requires a strong moral principle to prevent me from deliberately stepping into \
the street, and methodically knocking people's hats off - then, I account it high time to get to sea as soon as I \
can."""

TWO_CITIES = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of \
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the \
season of Darkness, it was the spring of hope, it was the winter of despair,"""

FERRIS_WHEEL = """The first Ferris wheel was built for the World's Columbian Exposition of 1893 in Chicago. Its \
designer, the bridge builder George Washington Gale Ferris Jr., wanted to outdo the Eiffel Tower, which had been the \
centre of the Paris fair four years before. The wheel was 80 metres tall and turned on an axle that was, at the time, \
the largest piece of forged steel in the world. It carried 36 cars, each the size of a bus, with 40 revolving chairs \
and room for 60 people; full, it held more than two thousand. A ride took twenty minutes and two turns: the first with \
six stops, so that passengers could leave and others could board, the second without any. It cost fifty cents, as much \
as entry to the whole fair, and about a million and a half people paid it. When the fair had closed the wheel was \
moved to a park on the north side of the city, where few came to see it, and then to the fair of 1904 in St. Louis. In \
1906 it was brought down with dynamite. The modern wheels that followed made one change that matters for anybody who \
has to wait: they do not stop. They turn slowly enough that people step off and others step on while the wheel keeps \
going, so that no car ever travels empty and nobody waits for the whole round to be over."""

MEETING = """Anna: The pump at station four failed again last night, the third time this month. Ben: The same seal? \
Anna: The same seal. We put in a new one from the old stock, and it lasted nine days. Carla: The old stock is rated \
for sixty degrees, and since the summer the water at station four has been at seventy. Ben: Then why do we still put \
them in? Anna: Because the new ones take six weeks, and the order has to be signed by the head office. Carla: I can \
ask the plant in Turin, they changed to the new type in spring and should have spares. Ben: Do that today. Until they \
arrive we run station four at half load, and the night shift looks at the seal every two hours. Anna: I will write \
that into the plan, and I will send the order to the head office again, this time with the cost of three failures."""

IS_PRIME = '''def is_prime(n):
    """True if n is a prime number."""
    if'''

LOG = """2031-04-02 06:58:11 INFO  wheel: turn 4180, 8 of 8 slots busy, 0 waiting
2031-04-02 06:58:12 INFO  wheel: turn 4181, 8 of 8 slots busy, 0 waiting
2031-04-02 06:58:13 INFO  wheel: turn 4182, 7 of 8 slots busy, 0 waiting
2031-04-02 06:58:14 INFO  wheel: turn 4183, 7 of 8 slots busy, 0 waiting
"""


def chat(name: str, max_tokens: int, content: str) -> dict[str, Any]:
    """A request with one message of a user."""
    messages = [{"role": "user", "content": content}]
    return {"id": name, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0}


def text(name: str, max_tokens: int, prompt: str) -> dict[str, Any]:
    """A request for the continuation of a text."""
    return {"id": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


PROMPTS: tuple[dict[str, Any], ...] = (
    chat("sky", 180, "Why is the sky blue?"),
    text("capital", 4, "The capital of France is"),
    text("moby-dick", 24, MOBY_DICK),
    chat("haiku", 48, "Write a haiku about the sea."),
    text("counting", 16, "one, two, three, four, five, six,"),
    chat("ferris-wheel", 100, "Summarise this in three sentences.\n\n" + FERRIS_WHEEL),
    chat("opposite", 16, "What is the opposite of hot? Answer in one word."),
    text("is-prime", 60, IS_PRIME),
    chat("languages", 200, "Give me five tips for learning a new language."),
    text("planets", 8, "The planets of the solar system are Mercury, Venus,"),
    chat("meeting", 64, "Who has to do what after this meeting?\n\n" + MEETING),
    text("proverb", 5, "A journey of a thousand miles begins with"),
    chat("fruit", 16, "Name one fruit."),
    text("two-cities", 24, TWO_CITIES),
    chat("cats-and-dogs", 190, "What are the differences between cats and dogs?"),
    chat("thanks", 16, "Translate into French: Thank you very much."),
    text("log", 48, LOG),
    chat("sum", 10, "What is 12 + 30?"),
    chat("black-hole", 150, "What is a black hole?"),
    text("honeybee", 100, "The honeybee is"),
    chat("year", 12, "In which year was the wheel brought down?\n\n" + FERRIS_WHEEL),
    chat("photosynthesis", 140, "What is photosynthesis, and why does it matter?"),
    text("alphabet", 16, "a b c d e f g h"),
    text("expedition", 60, "On the second morning of the expedition, we found"),
)
