"""One thread: more do not speed up tiny products."""

from tests.threads import one_thread as one_thread
