package operation

// Method is the backend and the algorithm of an operation.
type Method uint8

// The methods. Those named after a backend are for operations that have only one algorithm there.
// AllReduces over sockets, and between hosts, have several.
const (
	AloneOnly Method = iota
	OverSockets
	InMemory
	BetweenHosts
	ByDoubling
	ByRabenseifner
	ByRing
	ByDirect
	ByLeaders
	ByWaves
	ByRings
	ByAdasum
	Methods
)

var methodNames = [Methods]string{
	ByDoubling: algorithmNames[Doubling], ByRabenseifner: algorithmNames[Rabenseifner],
	ByRing: algorithmNames[Ring], ByDirect: algorithmNames[Direct],
	ByLeaders: "leaders", ByWaves: "waves", ByRings: "rings", ByAdasum: "adasum",
}

// String returns the name of the algorithm, or "" if the backend has only one.
func (m Method) String() string { return methodNames[m] }
