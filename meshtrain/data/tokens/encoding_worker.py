"""The program of a process that encodes, which `workers` starts.

It is run as `python -m meshtrain.data.tokens.encoding_worker DESCRIPTOR`.

It reads its task, and then pickled lists of chunks, from the socket DESCRIPTOR. It answers each
list with a pickled `EncodedBlock`. It ends when the socket is closed, also by the death of the
process that started it.
"""

import pickle
import signal
import sys
from multiprocessing.connection import Connection


def serve(connection: Connection) -> None:
    """Encode chunks until the other process closes the socket."""
    # Ctrl-C reaches every process of the terminal. This process ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        encoder = pickle.loads(connection.recv_bytes()).build()
        while True:
            chunks = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(encoder.encode(chunks), protocol=5))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
