#!/usr/bin/env bash
# Mooncake's store: a put into a store full of idle objects fails; what it makes room for is a later put.
#
# Guess: 50 of 64 MiB are objects that nobody reads or pins. A put of 15 MiB evicts what it needs and succeeds.
# Seen: it fails (-200), and the next ones do as well, a second apart: each failure starts the eviction of a few objects
#   only (eviction_ratio, 0.05), so a block that does not fit is lost several times while most of the store is idle.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" mooncake-transfer-engine-non-cuda==0.3.13.post1
# The package is linked with libibverbs1 of the system, although it uses TCP here.
if ! ldconfig -p | grep -q libibverbs.so.1; then
  (cd "$folder" && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 > /dev/null 2>&1 &&
    for package in *.deb; do dpkg-deb -x "$package" system; done)
  export LD_LIBRARY_PATH=$folder/system/usr/lib/x86_64-linux-gnu:$folder/system/lib/x86_64-linux-gnu
fi

"$folder/venv/bin/python" - "$folder/venv/bin/mooncake_master" \
  2> >(grep -vE '^([IWE][0-9]{4} |WARNING: Logging)' >&2) <<'PYTHON'
import socket
import subprocess
import sys
import time
from importlib.metadata import version

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
print("mooncake-transfer-engine-non-cuda", version("mooncake-transfer-engine-non-cuda"))


def port():
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


rpc, http, metrics = port(), port(), port()
master = subprocess.Popen(
    [
        sys.argv[1],
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc}",
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={http}",
        f"--metrics_port={metrics}",
    ],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
try:
    time.sleep(3)
    store = MooncakeDistributedStore()
    metadata = f"http://127.0.0.1:{http}/metadata"
    setup = f"127.0.0.1:{port()}", metadata, 64 * MIB, 16 * MIB, "tcp", "", f"127.0.0.1:{rpc}"
    assert store.setup(*setup) == 0

    assert all(store.put(f"idle-{at}", bytes(MIB)) == 0 for at in range(50))
    time.sleep(1)
    codes = []
    while not codes or (codes[-1] and len(codes) < 20):
        codes.append(store.put("large", bytes(15 * MIB)))
        time.sleep(1)
    print("put of 15 MiB next to 50 MiB of 64 that are idle, once a second until it succeeds:", codes)
    idle = sum(store.batch_is_exist([f"idle-{at}" for at in range(50)]))
    print("idle objects left:", idle)
    store.close()
    assert codes[:2] == [-200, -200] and codes[-1] == 0 and idle > 30
finally:
    master.kill()
    master.wait()
PYTHON
