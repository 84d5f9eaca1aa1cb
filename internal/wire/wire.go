// Package wire serves and dials the gRPC services between the processes of a job. Its directory has
// a .proto file for each service, and below it a package with the messages that `make generate`
// makes of that file.
package wire

// TasksProtocol is the ALPN protocol of the connections that tasks.proto describes.
const TasksProtocol = "hvdrun-tasks"

// StoreProtocol is the ALPN protocol of connections to the driver's store for programs in other
// languages: that of PyTorch's TCPStore.
const StoreProtocol = "hvdrun-store"

// ValuesProtocol is the ALPN protocol of connections that carry stored values of tasks from a host.
const ValuesProtocol = "hvdrun-values"

//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-grpc=$(go tool -n protoc-gen-go-grpc) --go_out=. --go_opt=module=github.com/hvdrun/hvdrun/internal/wire --go-grpc_out=. --go-grpc_opt=module=github.com/hvdrun/hvdrun/internal/wire rendezvous.proto notify.proto discovery.proto agent.proto control.proto enroll.proto tasks.proto carry.proto"
