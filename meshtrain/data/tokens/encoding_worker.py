"""A process that encodes: `python -m meshtrain.data.tokens.encoding_worker DESCRIPTOR`, started by `workers`.

It reads pickled lists of chunks from the socket DESCRIPTOR, the first message being its task, and answers each with a
pickled `EncodedBlock`. It ends when the socket is closed, also by the death of whoever started it.
"""

import pickle
import signal
import sys
from multiprocessing.connection import Connection


def serve(connection: Connection) -> None:
    """Answer until the other side is gone."""
    # ctrl-C reaches every process of the terminal: this one ends when the one that it works for does.
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
