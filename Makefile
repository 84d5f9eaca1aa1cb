# make help lists the targets.

GO ?= go
ARGS ?=
# The shell does not interpret the words of ARGS, as in ARGS='-run A/(b|c)', unless they contain quotes.
ifeq ($(findstring ',$(ARGS))$(findstring ",$(ARGS)),)
override ARGS := $(foreach word,$(ARGS),'$(word)')
endif
FUZZTIME ?= 60s

# For make prove: the time for each proving ground, and a seed and a proving ground to repeat one case.
PROVE ?= 10m
SEED ?=
ROOM ?= collectives
ROOMS = $(patsubst test/prove/%/main.go,%,$(wildcard test/prove/*/main.go))

# What make check and make demo need besides Go and its modules: a program or file, and its Debian package.
NEEDS = gcc:gcc /usr/include/stdlib.h:libc6-dev bash:bash git:git ip:iproute2 ssh:openssh-client \
	/usr/sbin/sshd:openssh-server etcd:etcd-server \
	/usr/bin/python3:python3 /usr/lib/python3/dist-packages/grpc:python3-grpcio \
	/usr/lib/python3/dist-packages/google/protobuf:python3-protobuf \
	/usr/lib/python3/dist-packages/cryptography:python3-cryptography \
	/usr/sbin/slurmctld:slurmctld /usr/sbin/slurmd:slurmd /usr/bin/scontrol:slurm-client /usr/sbin/munged:munge

# bring installs, as root, the missing packages of a list such as NEEDS. Slashes separate several packages of one program.
define bring
@missing=; for need in $(1); do \
	command -v "$${need%%:*}" >/dev/null || test -e "$${need%%:*}" || missing="$$missing $$(echo "$${need#*:}" | tr / " ")"; \
done; \
if [ -n "$$missing" ]; then \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "== deps: apt-get install$$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
		echo "missing programs; install these packages:$$missing" >&2; exit 1; \
	fi; \
fi
endef

# The generator of internal/kernel's vector code, a separate module.
VECTOR = internal/kernel/internal/gen

# The generator of the list of licences, a separate module.
LICENSES = internal/licenses/internal/gen

# A plugin that is a separate module, so that the main module does not need client-go.
KUBERNETES = plugins/kubernetes

# Modules that only check-kubernetes uses, for the programs of Kubernetes, Kueue and kustomize, and helm.
SERVERS = test/kubernetes/servers
KUEUE = test/kubernetes/kueue
HELM = test/kubernetes/helm

# Separate modules for frameworks that hvdrun itself does not need. gomlx's arithmetic fails under checkptr, which the race
# detector enables.
BROWSER = test/browser
FRAMEWORKS = frameworks/gomlx examples/gomlx
MODULES = examples/discovery-plugin $(KUBERNETES) $(BROWSER) $(FRAMEWORKS)
UNCHECKED = -gcflags=github.com/gomlx/compute/...=-d=checkptr=0

# The headers of NVML declare many functions as deprecated; the C compiler would warn about them in each build with cgo.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# A program under the race detector otherwise sleeps for a second before it exits.
export GORACE ?= atexit_sleep_ms=10

.DEFAULT_GOAL := help
.PHONY: help build lib wheel demo check check-costs check-all check-page check-torch check-net check-metrics check-calls check-deb check-systemd check-container release check-release deb figures picture measure measure-peers check-kubernetes check-slurm deps fresh tidy-examples frameworks kubernetes demo-gomlx test fuzz cross generate prove chaos chaos-drivers chaos-commits chaos-steps bench-recovery bench-pace bench-scale gpu-programs gpu-check look man clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build hvdrun and the examples into bin/, the plugins into bin/plugins/
	@echo "== build: bin/"
	@mkdir -p bin/plugins
	@CGO_ENABLED=0 $(GO) build -o bin/ ./cmd/hvdrun $$($(GO) list -f '{{if eq .Name "main"}}{{.ImportPath}}{{end}}' ./examples/...)
	@CGO_ENABLED=0 $(GO) build -o bin/plugins/ $$($(GO) list -f '{{if eq .Name "main"}}{{.ImportPath}}{{end}}' ./plugins/...)
	@CGO_ENABLED=0 $(GO) -C $(KUBERNETES) build -o $(CURDIR)/bin/plugins/ .

# The library needs cgo; for another architecture (GOARCH=arm64) also a C compiler for it (CC=aarch64-linux-gnu-gcc).
lib: ## build libhvdrun.so, for programs in C and for PyTorch, and its header into bin/lib/
	@echo "== lib: bin/lib/"
	@mkdir -p bin/lib
	@CGO_ENABLED=1 $(GO) build -buildmode=c-shared -trimpath -tags netgo,osusergo -ldflags '-s -w' -o bin/lib/libhvdrun.so ./cmd/libhvdrun
	@cp cmd/libhvdrun/hvdrun.h bin/lib/ && rm -f bin/lib/libhvdrun.h

wheel: lib ## build a wheel of the Python package and the library into bin/, with pip, setuptools and wheel: make wheel VERSION=v1.2.3
	@echo "== wheel: bin/"
	@rm -rf bin/.wheel && cp -r python bin/.wheel && cp bin/lib/libhvdrun.so bin/.wheel/hvdrun/
	@HVD_WHEEL_VERSION=$(VERSION) python3 -m pip wheel -q --no-deps --no-build-isolation --no-index -w bin bin/.wheel && rm -rf bin/.wheel

demo: build ## train on real digits while hosts come, die and go; ARGS go to the program
	@bin/demo $(ARGS)

# With -trimpath, all working trees of a machine share compiled packages and the results of vet and staticcheck.
PURE = GOFLAGS=-trimpath CGO_ENABLED=0

# Compilers collect garbage less often while they need little memory.
QUICK = GOGC=400 GOMEMLIMIT=2GiB

check: deps ## all checks that a change must pass: 8 minutes on two cores; installs what it needs
	@$(PURE) $(QUICK) $(GO) run ./test/check

check-costs: deps ## make check, which also fails if the tests of a package cost much more than budget.txt allows
	@$(PURE) $(QUICK) $(GO) run ./test/check costs

check-all: deps ## all tests and checks, for hours; PARTS='torch slurm' chooses some
	@$(PURE) $(QUICK) $(GO) run ./test/check all $(PARTS)

deps: ## install what the checks need: Debian packages (as root) and Go modules
	$(call bring,$(NEEDS))
	@echo "== deps: Go modules"
	@$(GO) mod download
	@$(GO) -C $(VECTOR) mod download
	@$(GO) -C $(LICENSES) mod download
	@$(GO) -C $(KUBERNETES) mod download

fresh: ## check that generated code is up to date
	@echo "== the vector code and the list of licences are what their generators write"
	@for dir in $(VECTOR) $(LICENSES); do $(PURE) $(GO) -C $$dir vet . && $(PURE) $(GO) -C $$dir test . || exit 1; done

tidy-examples: ## update the requirements of the modules of examples, plugins and frameworks
	@for dir in $(MODULES); do $(GO) -C $$dir mod tidy || exit 1; done

frameworks: ## check and test the modules of frameworks; ARGS go to go test
	@echo "== frameworks"
	@lint=$$($(PURE) $(GO) tool -n staticcheck) && export GOFLAGS="$$GOFLAGS $(UNCHECKED)" && for dir in $(FRAMEWORKS); do \
		$(GO) -C $$dir vet -tags training ./... && (cd $$dir && $$lint -tags training ./...) && \
		$(GO) -C $$dir test -race -vet=off -timeout 30m $(SHORT) $(ARGS) ./... || exit 1; \
	done

# The flags are those of make check, so that both share compiled packages.
kubernetes: ## check and test the plugin kubernetes, a separate module; ARGS go to go test
	@echo "== $(KUBERNETES)"
	@export $(PURE) $(QUICK); lint=$$($(GO) tool -n staticcheck) && \
		$(GO) -C $(KUBERNETES) vet . && (cd $(KUBERNETES) && $$lint .) && \
		$(GO) -C $(KUBERNETES) test -vet=off -ldflags=-w -timeout 30m $(SHORT) $(ARGS) .

check-page: ## test the page in a browser, and make its pictures anew; as root it installs chromium; ARGS go to go test
	$(call bring,chromium:chromium/fonts-dejavu-core)
	$(GO) -C $(BROWSER) test -count=1 -timeout 30m . -shots $(CURDIR)/docs $(ARGS)

# debian installs a Debian into a folder once, as root, with debootstrap from MIRROR. Its arguments are the folder, the suite
# and the packages.
define debian
$(call bring,debootstrap:debootstrap)
@test -e $(1)/ready || { rm -rf $(1) && mkdir -p $(1) && \
	debootstrap --variant=minbase $(2) $(1) $(MIRROR) >$(1).log 2>&1 && \
	cp /etc/resolv.conf $(1)/etc/ && { cp /etc/apt/apt.conf.d/* $(1)/etc/apt/apt.conf.d/ || true; } && \
	chroot $(1) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(3) >>$(1).log 2>&1 && \
	touch $(1)/ready; } || { tail $(1).log >&2; exit 1; }
endef

# The torch of another Debian runs in a chroot, which is made once (20 minutes on a slow machine, 3 GB of disk).
DEBIAN = $(CURDIR)/bin/.debian/$(SUITE)
ifdef SUITE
check-torch: ## run PyTorch programs by hvdrun torchrun; as root it installs python3-torch, with SUITE=trixie that of another Debian (from MIRROR); ARGS go to go test, such as -run Soak -soak 10m
	$(call debian,$(DEBIAN),$(SUITE),python3-torch python3-pip python3-setuptools python3-wheel mypy $(if $(filter sid,$(SUITE)),python3-transformers python3-accelerate python3-torch-ignite python3-xgboost))
	DEBIAN_ROOT=$(DEBIAN) $(GO) test -count=1 -timeout 90m -v ./test/torch $(ARGS) -python $(CURDIR)/test/torch/python
else
check-torch:
	$(call bring,/usr/lib/python3/dist-packages/torch:python3-torch)
	$(GO) test -race -count=1 -timeout 20m -run Torch $(ARGS) ./internal/tcpstore
	$(GO) test -race -count=1 -timeout 60m $(ARGS) ./test/torch ./torchrun
endif

demo-gomlx: ## train gomlx on Fashion-MNIST (package dataset-fashion-mnist), undisturbed and under deaths and resizes
	$(GO) -C examples/gomlx test -tags training -count=1 -timeout 1h -v -run TestFashionMNIST $(ARGS) .

# The tests of hosts in network namespaces run only where namespaces can be made; a container needs the capability
# SYS_ADMIN for that. Tests that run jobs of processes come first, two packages at a time: on a slow machine, tests that
# compute would starve them until hosts count as lost. driver/decide starts no goroutines, so its tests run without the
# race detector. check-torch tests programs of PyTorch.
test: DECIDES = ./driver/decide/... ./tasks/internal/queue/... ./torchrun/replica/internal/rules/...
test: JOBS = ./test/e2e/... ./internal/agent/... ./cmd/...
test: NETNS = $(shell unshare --net true 2>/dev/null && echo -tags netns || echo 'hosts in network namespaces are NOT tested: run make check-net as root' >&2)
test: ## run the tests, with more rounds than make check does, under the race detector where goroutines meet; ARGS go to go test
	@echo "== go test -race"
	@netns="$(NETNS)"; status=0; \
	$(GO) test -race -vet=off -timeout 60m -p 2 $(SHORT) $$netns $(ARGS) $(JOBS) || status=1; \
	$(GO) test -vet=off -timeout 60m $(SHORT) $(ARGS) $(DECIDES) || status=1; \
	$(GO) test -race -vet=off -timeout 60m -p 3 $(SHORT) $$netns $(ARGS) \
		$$($(GO) list ./... | grep -vxF "$$($(GO) list $$netns $(JOBS) $(DECIDES) ./test/torch)") || status=1; exit $$status

fuzz: ## fuzz the parsers of bytes from other processes, each for FUZZTIME (60s, or a number of inputs, 1000x); ARGS go to go test
	@grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9]+' . | sed 's|/[^/]*:func | |' | sort | { status=0; while read -r dir target; do \
		echo "== $$target of $$dir"; \
		$(GO) -C $$dir test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1s $(ARGS) . </dev/null || status=1; \
	done; exit $$status; }

cross: ## build and vet everything for arm64
	@echo "== build and vet for arm64"
	@CGO_ENABLED=0 GOARCH=arm64 $(GO) build ./...
	@CGO_ENABLED=0 GOARCH=arm64 $(GO) vet ./...
	@CGO_ENABLED=0 $(GO) vet -tags static ./internal/gpu ./cmd/hvdrun
	@for dir in $(KUBERNETES) $(FRAMEWORKS); do CGO_ENABLED=0 GOARCH=arm64 $(GO) -C $$dir vet ./... || exit 1; done

check-net: ## run a job over hosts that are network namespaces; needs root
	@echo "== hosts in network namespaces"
	@$(GO) vet -tags netns ./test/e2e/netns
	$(GO) test -tags netns -race -vet=off -timeout 30m -count=1 $(ARGS) ./test/e2e/netns

check-metrics: ## check the alarms with Prometheus's own promtool, and have Prometheus scrape a job; as root it installs the package prometheus; ARGS go to go test
	$(call bring,promtool:prometheus)
	$(GO) test -race -vet=off -count=1 $(ARGS) ./internal/metrics
	$(GO) test -vet=off -count=1 -run '^TestPrometheus$$' $(ARGS) ./test/e2e

check-calls: ## run jobs to which the kernel refuses a call, for each call and each error, and print the outcomes; ARGS go to go test
	@echo "== refused system calls"
	@$(PURE) $(GO) test -vet=off -count=1 -v -run '^TestRefusedCalls$$' $(ARGS) ./test/calls -whole

check-kubernetes: ## run jobs on a real API server, which it builds first with Kueue (6 minutes, once); needs root; ARGS go to go test
	@echo "== Kubernetes: bin/kubernetes/"
	@mkdir -p bin/kubernetes
	@version=$$($(GO) -C $(SERVERS) list -m -f '{{.Version}}' k8s.io/kubernetes) && for dir in $(SERVERS) $(KUEUE) $(HELM); do \
		$(PURE) $(GO) -C $$dir build -ldflags="-s -w -X k8s.io/component-base/version.gitVersion=$$version" \
			-o $(CURDIR)/bin/kubernetes/ tool || exit 1; \
	done
	@rm -rf bin/kubernetes/kueue.d
	@from=$$($(GO) -C $(KUEUE) list -m -f '{{.Dir}}' sigs.k8s.io/kueue)/config/components && \
		mkdir bin/kubernetes/kueue.d && cp -r --no-preserve=mode "$$from/crd" "$$from/webhook" bin/kubernetes/kueue.d/
	$(GO) test -vet=off -count=1 -timeout 30m -v $(ARGS) ./test/kubernetes

check-slurm: ## run jobs that ask a real Slurm for their nodes (--slurm); needs what make deps installs; ARGS go to go test
	@echo "== Slurm"
	$(GO) test -vet=off -count=1 -timeout 30m -v $(ARGS) -run '^(TestElasticJob|TestDriverInJob|TestNodeVariables)$$' ./plugins/slurm

generate: ## generate files again (needs protoc)
	@echo "== go generate"
	@$(GO) generate ./...

prove: ## run random programs of collectives, then random jobs, each for PROVE (10m); SEED=n ROOM=collectives|jobs repeats one
	@if [ -n "$(SEED)" ]; then $(GO) run ./test/prove/$(ROOM) -seed $(SEED) -one $(ARGS); else \
		status=0; for room in $(ROOMS); do \
			echo "== $$room for $(PROVE)"; $(GO) run ./test/prove/$$room -for $(PROVE) $(ARGS) || status=1; \
		done; exit $$status; \
	fi

# The targets below run one kind of random jobs each.
KIND = $(GO) run ./test/prove/jobs -seed 1 -kind
DRIVERS = $(KIND) drivers -cases 1 -drivers 100 -steps 20000
RECOVERY = $(KIND) recovery -cases 1 -kills 200 -joins 40 -arrivals 20

chaos: ## run 200 jobs under random SIGKILLs; ARGS go to the program
	@$(KIND) chaos -cases 200 $(ARGS)

chaos-drivers: ## run a job whose driver is killed 100 times, and resumed, while workers die; ARGS go to the program
	@$(DRIVERS) $(ARGS)

chaos-commits: ## kill workers, rank 0 as well, at 500 moments of a commit; ARGS go to the program
	@$(KIND) commits -cases 1 -commits 500 -state 2400000 $(ARGS)

chaos-steps: ## kill workers, spares and hvdrun while 1 to 8 workers train by elastic.Steps, in 50 jobs; ARGS go to the program
	@$(KIND) steps -cases 50 $(ARGS)

bench-recovery: ## measure recovery from deaths and growth; ARGS go to the program
	@$(RECOVERY) $(ARGS)

bench-pace: ## measure the pace of a job of four workers while one is killed each second for ten minutes; ARGS go to the program
	@$(KIND) pace -cases 1 -how kill -pause 1s -steps 11500 $(ARGS)

bench-scale: ## measure the driver with 100, 300 and 1,000 workers; ARGS go to the program
	@$(KIND) scale -cases 1 -sizes 100,300,1000 -rounds 3 $(ARGS)

gpu-programs: ## build the programs of gpu-check into bin/gpu-check/, for a machine without Go
	@echo "== build: bin/gpu-check/"
	@mkdir -p bin/gpu-check
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags='-s -w' -o bin/gpu-check/ ./test/gpucheck ./cmd/hvdrun ./examples/gpu

gpu-check: ## check and measure collectives on this machine's GPU, with programs of bin/gpu-check/ where there is no Go; ARGS go to the program
	@if command -v $(GO) >/dev/null; then $(MAKE) --no-print-directory gpu-programs; \
	elif ! test -x bin/gpu-check/gpucheck; then \
		echo "there is no Go here, and no bin/gpu-check: bring that folder from where make gpu-programs was run" >&2; exit 1; \
	fi
	@bin/gpu-check/gpucheck -json bin/gpu-check/gpu-check.json $(ARGS)

look: ## print the widest structs, the longest functions, the largest files and packages, and exported names without a user; ARGS go to the program
	@$(GO) run ./internal/look $(ARGS) .

deb: ## build the Debian package into bin/: the same bytes for the same commit; ARCH=arm64 for another machine
	@echo "== deb"
	@GO=$(GO) deploy/package/build bin $(ARCH)

release: ## build the files of a release into bin/release/, the same bytes for the same commit: make release VERSION=v1.2.3
	@GO=$(GO) deploy/release/build "$(VERSION)" bin/release

check-deb: ## install, use, upgrade and purge the Debian package in a fresh Debian; needs root and installs debootstrap
	$(call bring,debootstrap:debootstrap)
	@GO=$(GO) deploy/package/check

check-release: ## build a release twice, and test its files on a system without Go; needs root and installs debootstrap and buildah
	$(call bring,debootstrap:debootstrap buildah:buildah)
	@GO=$(GO) deploy/release/check

check-systemd: ## boot a fresh Debian, and run jobs by the units of the Debian package; needs root and installs debootstrap and systemd-container
	$(call bring,debootstrap:debootstrap systemd-nspawn:systemd-container)
	@GO=$(GO) deploy/package/check-systemd

check-container: ## build the steps of deploy/container/Dockerfile, and run the image; needs root and installs debootstrap and buildah
	$(call bring,debootstrap:debootstrap buildah:buildah)
	@GO=$(GO) deploy/container/check

# These commands measure the numbers of the README and of docs/figures.svg, into bin/figures/. Copy the tables into
# BENCHMARKS.md, with a note about what else ran on the machine at the time; then run make figures.
measure: build ## measure what the README's figures show, into bin/figures/: 10 minutes on two quiet cores; then copy the tables into BENCHMARKS.md
	@mkdir -p bin/figures
	$(RECOVERY) -tsv bin/figures/recovery.tsv >bin/figures/recovery.txt
	$(RECOVERY) -kills 30 -joins 8 -arrivals 0 -ballast 256 -change none >bin/figures/recovery-256MB.txt
	bin/hvdrun bench -np 2 --sizes 4,64KiB,1MiB,64MiB >bin/figures/bench.txt
	$(DRIVERS) >bin/figures/drivers.txt
	@ls -l bin/figures

# The newest releases of other libraries run in a separate Debian of 2 GB. docs/collectives.md describes the settings.
PEERS = $(CURDIR)/bin/.debian/peers
PEERS_2 = openmpi,openmpi-nocma,openmpi-acoll,openmpi-xhc,openmpi-ucx,mpich,mpich-ucc,torch,gloo
PEERS_4 = openmpi,openmpi-linear,openmpi-acoll,openmpi-ucx,openmpi-rabenseifner,mpich,mpich-posix,torch,gloo
measure-peers: build ## measure AllReduce beside the newest Open MPI, MPICH, PyTorch and Gloo, in Debian's sid (from MIRROR) and each with its best settings, into bin/figures/; needs root and brings debootstrap; ARGS go to hvdrun bench
	$(call debian,$(PEERS),sid,python3-torch openmpi-bin libopenmpi-dev mpich libmpich-dev libgloo-dev gcc g++ libc6-dev)
	@mkdir -p bin/figures
	@cp bin/hvdrun $(PEERS)/usr/local/bin/
	@unshare --mount sh -ec 'for dir in /proc /sys /dev; do mount --rbind $$dir $(PEERS)$$dir; done; for n in 2 4; do \
		if [ $$n = 2 ]; then peers=$(PEERS_2); else peers=$(PEERS_4); fi; \
		chroot $(PEERS) hvdrun bench -np $$n --sizes 4,64KiB,1MiB,16MiB,64MiB --seconds 0.3 --against $$peers $(ARGS); \
	done' >bin/figures/peers.txt
	@cat bin/figures/peers.txt

figures: ## draw docs/figures.svg from the tables of BENCHMARKS.md
	$(GO) test -vet=off -count=1 -run '^TestFigures$$' ./internal/bench -update

picture: build ## draw docs/faults.svg from the events of internal/replay/testdata; RECORD=1 first runs that job again
	@if [ -n "$(RECORD)" ]; then internal/replay/record internal/replay/testdata/faults.jsonl; fi
	$(GO) test -vet=off -count=1 -run '^TestPicture$$' ./internal/replay -update

man: ## write manual pages of hvdrun and its commands to bin/man/
	@$(GO) test -vet=off -count=1 -run '^TestManPages$$' ./cmd/hvdrun -man '$(CURDIR)/bin/man' >/dev/null && echo "== man: bin/man/"

clean: ## remove the built files
	rm -rf bin
