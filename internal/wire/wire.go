// Package wire serves and dials the gRPC services between the processes of a job. Its directory has
// a .proto file for each service, and below it a package with the messages that `make generate`
// generates from that file.
package wire

// ConnectProtocol is the ALPN protocol of the connections by which a driver takes over connections
// of workers from their agent: see agent.proto.
const ConnectProtocol = "hvdrun-connect"

// ValuesProtocol is the ALPN protocol of connections that carry stored values of tasks from a host.
const ValuesProtocol = "hvdrun-values"

//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-grpc=$(go tool -n protoc-gen-go-grpc) --go_out=. --go_opt=module=github.com/hvdrun/hvdrun/internal/wire --go-grpc_out=. --go-grpc_opt=module=github.com/hvdrun/hvdrun/internal/wire discovery.proto agent.proto control.proto enroll.proto tasks.proto"
