"""A small process that outlives a worker, and tells routers how the worker ended.

A worker starts it and shares a page of memory with it (`cluster.core.worker.last_words`). A pipe
between them ends with the worker; a fatal signal writes its traceback there. A router whose
connection to the worker broke asks here: it gives the key from the worker's hello, and gets one
line of JSON. That is known within milliseconds, and long before the worker is back.

It takes 17 MB of resident memory, and imports nothing but the page.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import socket
import sys
import threading
import time
from contextlib import suppress

from cluster.core.worker.last_words import PAGE_BYTES, Page, WorkerEnd

KEY_BYTES = 32
LINGER_S = 10.0
"""It answers for so long after the worker's end."""
GRACE_S = 0.25
"""A worker whose connection broke has so long to end, then it counts as alive."""
ASK_S = 1.0
MOST_QUESTIONS = 64
"""At a time; others wait."""
MOST_WORDS = 64 * 1024
FATAL = b"Fatal Python error"
"""Begins what `faulthandler` writes."""


class Witness:
    def __init__(self, page: Page, key: bytes) -> None:
        self._page = page
        self._key = key
        self._over = threading.Event()
        self._words = b""
        self._questions = threading.BoundedSemaphore(MOST_QUESTIONS)

    def hear(self, words: int) -> None:
        """Returns when the worker has ended. Its traceback goes to the log."""
        while data := os.read(words, 4096):
            self._words = (self._words + data)[:MOST_WORDS]
            with suppress(OSError):
                os.write(2, data)
        self._over.set()

    def end(self) -> tuple[WorkerEnd, str]:
        end, why = self._page.read_end()
        if end is not WorkerEnd.LIVES or not self._over.is_set():
            return end, why
        if FATAL in self._words:
            first = self._words[self._words.index(FATAL) :].split(b"\n")[0]
            return WorkerEnd.FATAL_SIGNAL, first.decode("utf-8", "replace")
        return WorkerEnd.KILLED, ""

    def answer_all(self, listener: socket.socket) -> None:
        while True:
            self._questions.acquire()
            connection, _ = listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                connection.settimeout(ASK_S)
                if hmac.compare_digest(_received(connection, KEY_BYTES), self._key):
                    connection.sendall(self._told())
        finally:
            self._questions.release()

    def _told(self) -> bytes:
        if self._page.read_end()[0] is WorkerEnd.LIVES:
            self._over.wait(GRACE_S)
        end, why = self.end()
        step = self._page.read_step()
        told = {
            "blame": end.blame,
            "why": f"{end}: {why}" if why else end,
            "complete": step.complete,
            "step": step.entries,
        }
        return json.dumps(told).encode() + b"\n"


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def main() -> None:
    page, words, listener = map(int, sys.argv[1:4])
    memory = memoryview(mmap.mmap(page, PAGE_BYTES))
    key = b""
    while len(key) < KEY_BYTES and (more := os.read(words, KEY_BYTES - len(key))):
        key += more
    witness = Witness(Page(memory), key)
    asked = socket.socket(fileno=listener)
    threading.Thread(target=witness.answer_all, args=(asked,), daemon=True).start()
    witness.hear(words)
    if witness.end()[0] is not WorkerEnd.CLOSED:
        time.sleep(LINGER_S)
    os._exit(0)


if __name__ == "__main__":
    main()
