module github.com/hvdrun/hvdrun

go 1.26.0

require (
	// For the event loop and the keys of hvdrun top. Without it: terminal modes and key sequences of our own.
	charm.land/bubbletea/v2 v2.0.9
	// For listing GPUs. Without it: NVML's declarations by hand.
	github.com/NVIDIA/go-nvml v0.13.3-0
	// For colours and widths of text in a terminal. Without it: tables of wide characters.
	github.com/charmbracelet/x/ansi v0.11.8
	// For calling CUDA and NCCL without cgo. Without it: C calls in assembly for each architecture.
	github.com/ebitengine/purego v0.11.3
	// For the file plugin, which sees a change at once. Without it: polling.
	github.com/fsnotify/fsnotify v1.9.0
	// For OpenTelemetry's messages in our log. Without it: its errors on standard error.
	github.com/go-logr/logr v1.4.4
	// For go-plugin's messages in our log. Without it: lines of plugins without a level.
	github.com/hashicorp/go-hclog v1.6.3
	// For discovery plugins as processes. Without it: their handshake, versions and TLS.
	github.com/hashicorp/go-plugin v1.8.0
	// For gossip among agents. Without it: SWIM and its encryption.
	github.com/hashicorp/memberlist v0.7.0
	// For the DNS plugin: SRV records with their TTL. Without it: a DNS parser.
	github.com/miekg/dns v1.1.73
	// For metrics. Without it: a registry and the text format.
	github.com/prometheus/client_golang v1.25.0
	// For tests of the command line (testscript). Without it: a script language for tests.
	github.com/rogpeppe/go-internal v1.16.0
	// For the log. Without it: levels, fields and hooks.
	github.com/sirupsen/logrus v1.10.2
	// For commands, help and completion. Without it: all three.
	github.com/spf13/cobra v1.10.2
	// For flags. Cobra requires it.
	github.com/spf13/pflag v1.0.10
	// For one table of flags, variables and files. Without it: their order of precedence.
	github.com/spf13/viper v1.21.0
	// For etcd's messages. Its client requires it.
	go.etcd.io/etcd/api/v3 v3.7.3
	// For journals and torchrun's rendezvous in etcd. Without it: leases and watches over gRPC.
	go.etcd.io/etcd/client/v3 v3.7.3
	// For traces. Without it: attributes and span kinds.
	go.opentelemetry.io/otel v1.47.0
	// For traces sent to a collector by gRPC. Without it: an OTLP client.
	go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc v1.47.0
	// For traces sent to a collector by HTTP. Without it: an OTLP client.
	go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp v1.47.0
	// For sending traces in batches. Without it: a bounded queue of spans.
	go.opentelemetry.io/otel/sdk v1.47.0
	// For spans. OpenTelemetry's SDK requires it.
	go.opentelemetry.io/otel/trace v1.47.0
	// For tests that find leaked goroutines. Without it: comparing stack dumps.
	go.uber.org/goleak v1.3.0
	// For the messages of etcd's client in our log. Without it: its messages on standard error.
	go.uber.org/zap v1.28.0
	// For config files, with line numbers in errors. Without it: a YAML parser.
	go.yaml.in/yaml/v3 v3.0.5
	// For a release's modules in the form of a module proxy. Without it: their zip files and checksums.
	golang.org/x/mod v0.41.0
	// For tests that send HTTP/2 frames that no client sends. Without it: frames by hand.
	golang.org/x/net v0.61.0
	// For Linux system calls. Without it: tables of their numbers.
	golang.org/x/sys v0.49.0
	// For calls among drivers, agents, workers and plugins. Without it: streams, deadlines, flow control.
	google.golang.org/grpc v1.85.0
	// For the messages of these calls. Without it: a codec.
	google.golang.org/protobuf v1.36.12
	// For random tests that shrink a failing case. Without it: a shrinker for each test.
	pgregory.net/rapid v1.3.0
)

require (
	github.com/BurntSushi/toml v1.4.1-0.20240526193622-a339e1f7089c // indirect
	github.com/aymanbagabas/go-udiff v0.4.1 // indirect
	github.com/beorn7/perks v1.0.1 // indirect
	github.com/cenkalti/backoff/v5 v5.0.3 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/charmbracelet/colorprofile v0.4.3 // indirect
	github.com/charmbracelet/ultraviolet v0.0.0-20260811164956-006e29f97886 // indirect
	github.com/charmbracelet/x/exp/golden v0.0.0-20250806222409-83e3a29d542f // indirect
	github.com/charmbracelet/x/term v0.2.2 // indirect
	github.com/charmbracelet/x/termios v0.1.1 // indirect
	github.com/charmbracelet/x/windows v0.2.2 // indirect
	github.com/clipperhouse/displaywidth v0.11.0 // indirect
	github.com/clipperhouse/uax29/v2 v2.7.0 // indirect
	github.com/coreos/go-semver v0.3.1 // indirect
	github.com/coreos/go-systemd/v22 v22.7.0 // indirect
	github.com/cpuguy83/go-md2man/v2 v2.0.6 // indirect
	github.com/fatih/color v1.13.0 // indirect
	github.com/go-logr/stdr v1.2.2 // indirect
	github.com/go-viper/mapstructure/v2 v2.5.0 // indirect
	github.com/golang/protobuf v1.5.4 // indirect
	github.com/google/btree v1.1.3 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/grpc-ecosystem/grpc-gateway/v2 v2.31.0 // indirect
	github.com/hashicorp/errwrap v1.1.0 // indirect
	github.com/hashicorp/go-immutable-radix v1.3.1 // indirect
	github.com/hashicorp/go-metrics v0.7.0 // indirect
	github.com/hashicorp/go-msgpack/v2 v2.1.5 // indirect
	github.com/hashicorp/go-multierror v1.1.1 // indirect
	github.com/hashicorp/go-sockaddr v1.0.7 // indirect
	github.com/hashicorp/golang-lru v1.0.2 // indirect
	github.com/hashicorp/yamux v0.1.2 // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/kylelemons/godebug v1.1.0 // indirect
	github.com/lucasb-eyer/go-colorful v1.4.1 // indirect
	github.com/mattn/go-colorable v0.1.12 // indirect
	github.com/mattn/go-isatty v0.0.22 // indirect
	github.com/mattn/go-runewidth v0.0.24 // indirect
	github.com/muesli/cancelreader v0.2.2 // indirect
	github.com/munnerz/goautoneg v0.0.0-20191010083416-a7dc8b61c822 // indirect
	github.com/oklog/run v1.1.0 // indirect
	github.com/pelletier/go-toml/v2 v2.2.4 // indirect
	github.com/prometheus/client_model v0.6.3 // indirect
	github.com/prometheus/common v0.72.0 // indirect
	github.com/prometheus/procfs v0.22.0 // indirect
	github.com/rivo/uniseg v0.4.7 // indirect
	github.com/russross/blackfriday/v2 v2.1.0 // indirect
	github.com/sagikazarmark/locafero v0.11.0 // indirect
	github.com/sean-/seed v0.0.0-20170313163322-e2103e2c3529 // indirect
	github.com/sourcegraph/conc v0.3.1-0.20240121214520-5f936abd7ae8 // indirect
	github.com/spf13/afero v1.15.0 // indirect
	github.com/spf13/cast v1.10.0 // indirect
	github.com/subosito/gotenv v1.6.0 // indirect
	github.com/xo/terminfo v0.0.0-20220910002029-abceb7e1c41e // indirect
	go.etcd.io/etcd/client/pkg/v3 v3.7.3 // indirect
	go.opentelemetry.io/auto/sdk v1.2.1 // indirect
	go.opentelemetry.io/otel/exporters/otlp/otlptrace v1.47.0 // indirect
	go.opentelemetry.io/otel/log v1.47.0 // indirect
	go.opentelemetry.io/otel/metric v1.47.0 // indirect
	go.opentelemetry.io/proto/otlp v1.11.1 // indirect
	go.uber.org/multierr v1.11.0 // indirect
	golang.org/x/exp/typeparams v0.0.0-20231108232855-2478ac86f678 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	golang.org/x/tools v0.51.0 // indirect
	google.golang.org/genproto/googleapis/api v0.0.0-20260928230214-8a89bd6388cc // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260928230214-8a89bd6388cc // indirect
	google.golang.org/grpc/cmd/protoc-gen-go-grpc v1.6.2 // indirect
	honnef.co/go/tools v0.8.2 // indirect
)

tool (
	google.golang.org/grpc/cmd/protoc-gen-go-grpc
	google.golang.org/protobuf/cmd/protoc-gen-go
	honnef.co/go/tools/cmd/staticcheck
)
