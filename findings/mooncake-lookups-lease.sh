#!/usr/bin/env bash
# Mooncake's store: a question whether a key exists leases its object, so lookups alone keep new objects out.
#
# Guess: is_exist changes nothing, and the object can be removed at once. A lease, as get gives one, protects an object
#   until it ends, from an upsert as well; a store full of leased objects refuses what does not fit.
# Seen: after is_exist or batch_is_exist, a removal is refused (-706), after a put it is not. An upsert replaces what is
#   under the lease. With 55 of 64 MiB asked about and never read, 60 puts of 1 MiB each return 0, and a few of these
#   objects are there afterwards, with all of the old ones: a router or a scheduler that looks keys up decides what
#   stays.
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
        "--default_kv_lease_ttl=60s",
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

    assert store.put("put", b"old") == store.put("asked", b"old") == store.put("read", b"old") == 0
    assert store.is_exist("asked") == 1 and store.get("read") == b"old"
    removals = {key: store.remove(key) for key in ("put", "asked", "read")}
    print("removals after a put, a question and a read:", removals)
    upsert = store.upsert("read", b"new"), store.get("read")
    print("upsert of the object under a lease, and what get returns then:", upsert)
    assert removals == {"put": 0, "asked": -706, "read": -706}
    assert upsert == (0, b"new")

    old, new = [f"old-{at}" for at in range(55)], [f"new-{at}" for at in range(60)]
    assert all(store.put(key, bytes(MIB)) == 0 for key in old)
    assert all(store.batch_is_exist(old))
    codes = []
    for key in new:
        codes.append(store.put(key, bytes(MIB)))
        time.sleep(0.1)
    time.sleep(1)
    left = sum(store.batch_is_exist(old)), sum(store.batch_is_exist(new))
    print("60 puts next to 55 objects that were asked about: successes, old ones left, new ones left:")
    print(codes.count(0), *left)
    store.close()
    assert codes.count(0) > 50 and left[0] == 55 and left[1] < 10
finally:
    master.kill()
    master.wait()
PYTHON
