"""Sixty-four prompts of many kinds and lengths, the same in every run."""

OPENINGS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Q: What is 17 plus 25?\nA:",
    "The three states of matter are",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "Der schnelle braune Fuchs springt",
    "La inteligencia artificial es",
    "<html>\n<head>\n<title>",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, the first humans",
    "import numpy as np\n\nx = np.",
    "Photosynthesis is the process by which",
    "To be, or not to be, that is",
    "🎉 Happy birthday to",
]
FRAMES = [
    "{}",
    "Here is a short note on the topic, written for beginners.\n\n{}",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "Read the following carefully. " * 12 + "\n\n{}",
]
PROMPTS = [frame.format(opening) for frame in FRAMES for opening in OPENINGS]
assert len(PROMPTS) == 64
