// Package wire contains the messages and gRPC services between the processes of a job, generated
// from the .proto files in its directory by `make generate`.
package wire

// TasksProtocol is the ALPN protocol of the connections that tasks.proto describes.
const TasksProtocol = "hvdrun-tasks"

// ValuesProtocol is the ALPN protocol of connections that carry stored values of tasks from a host.
const ValuesProtocol = "hvdrun-values"

//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-grpc=$(go tool -n protoc-gen-go-grpc) --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative rendezvous.proto notify.proto discovery.proto agent.proto control.proto enroll.proto tasks.proto"
