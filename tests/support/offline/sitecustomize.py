"""Found by Python at start where this folder is on the path: no script reaches the network."""

import socket


def refuse(self, address):
    raise OSError(f"no network here: {address}")


socket.socket.connect = socket.socket.connect_ex = refuse  # type: ignore[method-assign]
