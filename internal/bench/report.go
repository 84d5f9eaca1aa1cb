package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"
)

// Ours is the name of hvdrun's own rows.
const Ours = "hvdrun"

// Report is the result of all measurements.
type Report struct {
	Op      Op
	Ranks   int
	Hosts   int // 0: one
	Rounds  int
	Results []Result
	// About are lines about the libraries: their versions and settings.
	About []string
}

// peers returns the names of libraries in order of appearance, hvdrun first.
func (r *Report) peers() []string {
	names := []string{Ours}
	for _, res := range r.Results {
		if !slices.Contains(names, res.Peer) {
			names = append(names, res.Peer)
		}
	}
	return names
}

// sizes returns the measured sizes, ascending.
func (r *Report) sizes() (sizes []int) {
	for _, res := range r.Results {
		if res.Op != Stream && !slices.Contains(sizes, res.Bytes) {
			sizes = append(sizes, res.Bytes)
		}
	}
	slices.Sort(sizes)
	return sizes
}

// row returns the merged row of all rounds.
func (r *Report) row(peer string, op Op, bytes int) (Row, bool) {
	var found []Result
	for _, res := range r.Results {
		if res.Peer == peer && res.Op == op && res.Bytes == bytes {
			found = append(found, res)
		}
	}
	if len(found) == 0 {
		return Row{}, false
	}
	return merged(found), true
}

// roof returns the bandwidth, in GB/s, to which memory limits an all-reduce of this size, and the
// bandwidth of concurrent copies by all ranks from which that follows. It needs Spec.Memory.
//
// Each of n ranks must at least read its n-th part of all n tensors, write it, and copy the other
// parts of the result: 3 − 1/n times the bytes in total. A copy of a byte moves two.
func (r *Report) roof(bytes int) (roof, copied float64, ok bool) {
	row, ok := r.row(Ours, CopyAll, bytes)
	if !ok || row.Median == 0 {
		return 0, 0, false
	}
	n := float64(r.Ranks)
	copied = n * row.gbps() / 2 // half of the bytes are copied onto the other half
	return 2 * copied / (3*n - 1), copied, true
}

// WriteTable writes a table as text. A ratio is a peer's time divided by hvdrun's.
func (r *Report) WriteTable(w io.Writer) error {
	peers := r.peers()
	memory := slices.ContainsFunc(r.Results, func(res Result) bool { return res.Op == CopyAll })
	fmt.Fprintf(w, "%s, float32, %d ranks%s; least, and medians of %d rounds; ratio: how many times longer the peer takes\n\n",
		r.Op, r.Ranks, r.on(), r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	head := "bytes\tmin us\tmedian us\tp99 us\tGB/s\t"
	beside := peers[1:]
	if len(beside) > mostBeside {
		beside = nil
	}
	for _, p := range beside {
		head += p + " us\tratio\t"
	}
	if r.Op == Gradients {
		head += "reduced after us\treduction us\thidden\t"
	}
	hosts := r.between()
	if hosts {
		head += "on sockets\tof a host\tshare of wire\t"
	}
	if memory {
		head += fmt.Sprintf("copy by 1 GB/s\tby %d GB/s\troof GB/s\tshare\t", r.Ranks)
	}
	fmt.Fprintln(t, head)
	for _, bytes := range r.sizes() {
		ours, ok := r.row(Ours, r.Op, bytes)
		if !ok {
			continue
		}
		line := SizeText(bytes) + "\t" + micros(ours.Min) + "\t" + micros(ours.Median) + "\t" + micros(ours.P99) + "\t" + number(ours.gbps()) + "\t"
		for _, p := range beside {
			if row, ok := r.row(p, r.Op, bytes); ok {
				line += micros(row.Median) + "\t" + number(row.Median/ours.Median) + "\t"
			} else {
				line += "-\t-\t"
			}
		}
		if r.Op == Gradients {
			line += r.hidden(ours)
		}
		if hosts {
			line += r.wire(ours)
		}
		if memory {
			line += r.memory(bytes, ours)
		}
		fmt.Fprintln(t, line)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if err := r.writePeers(w); err != nil {
		return err
	}
	return r.writeNotes(w, hosts)
}

// mostBeside is the maximum number of libraries with columns beside hvdrun's; further ones have
// separate lines.
const mostBeside = 3

// writePeers writes what was measured besides hvdrun, and for several libraries, which one is the
// fastest for each size.
func (r *Report) writePeers(w io.Writer) error {
	peers := r.peers()[1:]
	if len(peers) > 1 {
		fmt.Fprintln(w)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		head, last := "median us · ratio\t", "fastest\t"
		lines := make([]string, len(peers))
		for _, bytes := range r.sizes() {
			head += SizeText(bytes) + "\t"
			ours, _ := r.row(Ours, r.Op, bytes)
			best, name := math.Inf(1), "-"
			for i, p := range peers {
				cell := "-\t"
				if row, ok := r.row(p, r.Op, bytes); ok && ours.Median > 0 {
					cell = micros(row.Median) + " · " + number(row.Median/ours.Median) + "\t"
					if row.Median < best {
						best, name = row.Median, p
					}
				}
				lines[i] += cell
			}
			last += name + "\t"
		}
		fmt.Fprintln(t, head)
		for i, p := range peers {
			if len(peers) > mostBeside {
				fmt.Fprintln(t, p+"\t"+lines[i])
			}
		}
		fmt.Fprintln(t, last)
		if err := t.Flush(); err != nil {
			return err
		}
	}
	for i, line := range r.About {
		if i == 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, line)
	}
	return nil
}

// on returns words for the number of hosts, if there are several.
func (r *Report) on() string {
	if r.Hosts <= 1 {
		return ""
	}
	return fmt.Sprintf(" on %d hosts", r.Hosts)
}

// writeNotes explains the columns that not every table has.
func (r *Report) writeNotes(w io.Writer, hosts bool) error {
	if r.Op == Gradients {
		if _, err := fmt.Fprintln(w, "\nhidden: the share of one reduction after the backward pass that is saved where gradients are reduced during the pass,\n"+
			"which takes as long as a reduction"); err != nil {
			return err
		}
	}
	if !hosts {
		return nil
	}
	_, err := fmt.Fprintf(w, "\non sockets: bytes sent for an operation by all ranks, and by the host that sends most; share of wire: those by the time\n"+
		"that one rank needs to send them to a rank of another host, %s at %s GB/s\n", SizeText(streamSize), number(r.stream()))
	return err
}

// hidden returns the columns of a reduction during a backward pass.
func (r *Report) hidden(ours Row) string {
	after, ok := r.row(Ours, After, ours.Bytes)
	alone, ok2 := r.row(Ours, AllReduce, ours.Bytes)
	if !ok || !ok2 || alone.Median == 0 {
		return "-\t-\t-\t"
	}
	return micros(after.Median) + "\t" + micros(alone.Median) + "\t" + number((after.Median-ours.Median)/alone.Median) + "\t"
}

// between reports whether there are ranks of several hosts.
func (r *Report) between() bool {
	return slices.ContainsFunc(r.Results, func(res Result) bool { return res.Op == Stream })
}

// stream returns the bandwidth of one stream between hosts, in GB/s.
func (r *Report) stream() float64 {
	row, _ := r.row(Ours, Stream, streamSize)
	return row.gbps()
}

// wire returns the columns with the bytes sent on sockets.
func (r *Report) wire(ours Row) string {
	line := byteCount(ours.Sent) + "\t" + byteCount(ours.HostOut) + "\t"
	stream := r.stream()
	if stream == 0 || ours.Median == 0 {
		return line + "-\t"
	}
	return line + number(ours.HostOut/ours.Median/1e3/stream) + "\t"
}

// byteCount formats a number of bytes in the largest unit that is not larger.
func byteCount(n float64) string {
	for _, u := range units[:3] {
		if n >= float64(u.bytes) {
			return number(n/float64(u.bytes)) + u.suffix
		}
	}
	return strconv.FormatFloat(n, 'f', 0, 64) + "B"
}

// memory returns the columns of memory bandwidth.
func (r *Report) memory(bytes int, ours Row) string {
	alone, ok := r.row(Ours, CopyAlone, bytes)
	roof, copied, ok2 := r.roof(bytes)
	if !ok || !ok2 {
		return "-\t-\t-\t-\t"
	}
	line := number(alone.gbps()/2) + "\t" + number(copied) + "\t"
	if r.Op != AllReduce {
		return line + "-\t-\t"
	}
	return line + number(roof) + "\t" + number(ours.gbps()/roof) + "\t"
}

// micros formats a time with adequate precision.
func micros(us float64) string {
	if us < 100 {
		return strconv.FormatFloat(us, 'f', 2, 64)
	}
	return strconv.FormatFloat(us, 'f', 0, 64)
}

// number formats a ratio or bandwidth.
func number(v float64) string {
	switch {
	case v < 1:
		return strconv.FormatFloat(v, 'f', 3, 64)
	case v < 100:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// ops returns the measured operations, the requested one first.
func (r *Report) ops() []Op {
	ops := []Op{r.Op}
	for _, res := range r.Results {
		if !slices.Contains(ops, res.Op) {
			ops = append(ops, res.Op)
		}
	}
	return ops
}

// WriteTSV writes the rows of every round and the merged rows, whose round is "all".
func (r *Report) WriteTSV(w io.Writer) error {
	fmt.Fprintln(w, "round\tpeer\top\tranks\tbytes\tsamples\tmin_us\tmedian_us\tp99_us\tGBps\tsocket_bytes\thost_bytes")
	line := func(round, peer string, row Row) error {
		_, err := fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%.3f\t%.3f\t%.3f\t%.4f\t%.0f\t%.0f\n", round, peer, row.Op, r.Ranks, row.Bytes,
			row.Samples, row.Min, row.Median, row.P99, row.gbps(), row.Sent, row.HostOut)
		return err
	}
	for _, res := range r.Results {
		if err := line(strconv.Itoa(res.Round), res.Peer, res.Row); err != nil {
			return err
		}
	}
	for _, peer := range r.peers() {
		for _, op := range r.ops() {
			sizes := r.sizes()
			if op == Stream {
				sizes = []int{streamSize}
			}
			for _, bytes := range sizes {
				row, ok := r.row(peer, op, bytes)
				if !ok {
					continue
				}
				if err := line("all", peer, row); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
