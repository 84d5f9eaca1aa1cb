package operation

// Thresholds are sizes of data, in bytes, at which another algorithm becomes the cheapest, as
// measured between processes of one machine. The reason for them is a model in which a message of b
// bytes takes α + β·b, and combining b bytes takes γ·b (Thakur, Rabenseifner, Gropp: Optimization
// of Collective Communication Operations in MPICH, 2005). With n ranks and b bytes:
//
//	Doubling      log2(n)·(α + β·b + γ·b)
//	Rabenseifner  2·log2(n)·α + 2·(n−1)/n·β·b + (n−1)/n·γ·b
//	Ring, Direct  2·(n−1)·α   + 2·(n−1)/n·β·b + (n−1)/n·γ·b
//
// Doubling is best where α dominates. The others send the same number of bytes: Ring is best where
// its messages are large enough to overlap, since each rank sends to one neighbour only.
var Thresholds = struct {
	doublingPair int // up to here two ranks use Doubling …
	doublingMore int // … and more than two ranks
	ringFrom     int // from here a power of two of ranks uses Ring too
	OneShot      int // up to here Direct sends all data to all ranks, in one step

	ThroughOne     int // up to here one rank of each host exchanges all data with the other hosts
	Wave           int // largest wave between hosts: while a wave is in flight, the next one is combined …
	CrowdedWave    int // … and the largest if ranks of a host share cores, so that little overlaps
	FewWaves       int // data shorter than this number of waves is cut into this number of shorter waves …
	LeastOfWave    int // … if each has at least this many bytes for each rank
	LargestIfReady int // largest data that is reduced before it is known that all ranks are ready

	AdasumAlone      int // up to here every rank of a host combines whole vectors: dividing them needs more messages …
	AdasumThroughOne int // … and up to here the first ranks of several hosts do so too

	FoldFew   int // up to this total size of the values of all ranks, every host folds all values of a ReduceTree
	FoldPiece int // largest piece of a value of a ReduceTree in flight within a host …
	HostPiece int // … and between hosts

	Shared int // from here a frame is divided among the connections to a peer
}{
	doublingPair: 32 << 10,
	doublingMore: 16 << 10,
	ringFrom:     1 << 20,
	OneShot:      8 << 10,

	ThroughOne:     8 << 10,
	Wave:           2 << 20,
	CrowdedWave:    32 << 20,
	FewWaves:       16,
	LeastOfWave:    64 << 10,
	LargestIfReady: 1 << 20,

	AdasumAlone:      16 << 10,
	AdasumThroughOne: 128 << 10,

	FoldFew:   64 << 10,
	FoldPiece: 4 << 20,
	HostPiece: 16 << 20,

	Shared: 64 << 10,
}
