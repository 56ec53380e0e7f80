"""What a person runs."""

import time

STARTED = time.monotonic()  # seconds; before the heavy imports, so that start-up figures count them
