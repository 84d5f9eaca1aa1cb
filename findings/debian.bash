# Findings about Debian's packages source this file. packages NAME… installs Debian sid with these packages in $SID, unless
# it is there. sid COMMAND… runs a command in it, in a temporary folder that has the path $d inside and outside.
d=$(mktemp -d); trap 'rm -rf "$d"' EXIT; cd "$d" || exit 2
packages() {
  if [ -z "${SID:-}" ]; then
    SID=$d/sid
    debootstrap --variant=minbase --include="$(IFS=,; echo "$*")" sid "$SID" > debootstrap.log 2>&1 || { tail -3 debootstrap.log; exit 2; }
  fi
  chroot "$SID" dpkg-query -W -f '${Package} ${Version}\n' "$@" || exit 2
}
sid() {
  SID=$SID d=$d unshare --mount sh -ec 'for dir in /proc /dev /sys "$d"; do mkdir -p "$SID$dir"; mount --rbind "$dir" "$SID$dir"; done
    exec chroot "$SID" /usr/bin/env -C "$d" "$@"' sh "$@"
}
# without_libuv makes torchrun work in Debian's torch, which is built without libuv and requires it, even with USE_LIBUV=0.
without_libuv() {
  mkdir site; cat > site/sitecustomize.py <<'PY'
import importlib
import torch.distributed as dist
class TCPStore(dist.TCPStore):
    def __init__(self, *a, **k):
        super().__init__(*a, **{**k, "use_libuv": False})
for name in "", ".rendezvous", ".elastic.rendezvous.c10d_rendezvous_backend":
    importlib.import_module("torch.distributed" + name).TCPStore = TCPStore
PY
  export PYTHONPATH=$d/site
}
