# Findings about Go modules source this file. It enters a temporary folder. modules PATH@VERSION… makes main.go there the program of
# a module that requires these modules.
set -u; d=$(mktemp -d); trap 'chmod -R u+w "$d"; rm -rf "$d"' EXIT; cd "$d" || exit 2
export GOFLAGS=-mod=mod GOWORK=off; out=()
modules() {
  [ -e go.mod ] || go mod init finding 2>/dev/null
  go get "$@" 2>/dev/null && go mod tidy 2>/dev/null || exit 2
}
