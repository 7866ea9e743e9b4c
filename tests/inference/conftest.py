"""One thread: more do not speed up tiny products, and slow them on a busy machine."""

from tests.threads import one_thread as one_thread
