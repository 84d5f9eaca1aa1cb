module example.com/fashion

go 1.26.5

require (
	github.com/gomlx/compute v0.1.2
	github.com/gomlx/gomlx v0.28.2
	github.com/hvdrun/hvdrun v0.0.0
	github.com/hvdrun/hvdrun/frameworks/gomlx v0.0.0
)

require (
	github.com/go-logr/logr v1.4.4 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	github.com/sirupsen/logrus v1.10.2 // indirect
	golang.org/x/exp v0.0.0-20260410095643-746e56fc9e2f // indirect
	golang.org/x/sys v0.49.0 // indirect
	k8s.io/klog/v2 v2.140.0 // indirect
)

replace (
	github.com/hvdrun/hvdrun => ../..
	github.com/hvdrun/hvdrun/frameworks/gomlx => ../../frameworks/gomlx
)
