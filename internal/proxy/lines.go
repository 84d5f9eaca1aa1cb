package proxy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/rendezvous"
)

// Version is the version of the lines: see docs/reference/worker-protocol.md.
const Version = 1

const (
	// maxLine bounds a line of a worker, in bytes.
	maxLine    = 1 << 20
	maxStrings = 64       // addresses of a line; lost ranks that are kept of one
	maxWord    = 256      // bytes of an address or a name
	maxCause   = 4 << 10  // bytes
	maxStacks  = 64 << 10 // bytes of an answer with stacks
	maxRank    = 1 << 20
)

// request is a line of a worker. Do says which of the other fields have a meaning.
type request struct {
	Do string `json:"do"`
	hello
	// join
	Handle     string   `json:"handle,omitempty"`
	Addresses  []string `json:"addresses,omitempty"`
	HoldsState bool     `json:"holds_state,omitempty"`
	Trained    *bool    `json:"trained,omitempty"`
	Lost       []int    `json:"lost,omitempty"`
	Cause      string   `json:"cause,omitempty"`
	// join, report and beat
	Commits uint64 `json:"commits,omitempty"`
	// report
	What    string `json:"what,omitempty"`
	Backend string `json:"backend,omitempty"`
	failure
	beat
	// figures
	Figures map[string]*float64 `json:"figures,omitempty"` // null: not a finite number
	// stacks
	ID   uint64 `json:"id,omitempty"`
	Text string `json:"text,omitempty"`
}

// hello is the first line.
type hello struct {
	Version int    `json:"version,omitempty"`
	Program string `json:"program,omitempty"`
}

// failure is what ends a program.
type failure struct {
	Error string `json:"error,omitempty"`
	Where string `json:"where,omitempty"`
}

// beat is where a worker is.
type beat struct {
	Phase     string     `json:"phase,omitempty"`
	Written   uint64     `json:"written,omitempty"`
	Operation *operation `json:"operation,omitempty"`
}

// operation is the collective operation in which a worker is, or was last.
type operation struct {
	Number  uint64 `json:"number"`
	What    string `json:"what"`
	Waiting bool   `json:"waiting"`
}

// parse reads a line and checks its bounds.
func parse(line []byte) (request, error) {
	var r request
	if !utf8.Valid(line) {
		return r, errors.New("a line that is not UTF-8")
	}
	if err := json.Unmarshal(line, &r); err != nil {
		return r, fmt.Errorf("a line that is not a JSON object of the protocol: %w", err)
	}
	switch {
	case len(r.Do) > maxWord || len(r.Program) > maxWord || len(r.What) > maxWord || len(r.Backend) > maxWord || len(r.Phase) > maxWord:
		return r, fmt.Errorf("a word of more than %d bytes", maxWord)
	case len(r.Handle) > rendezvous.MaxHandle:
		return r, fmt.Errorf("a handle of %d bytes; at most %d", len(r.Handle), rendezvous.MaxHandle)
	case len(r.Addresses) > maxStrings:
		return r, fmt.Errorf("%d addresses; at most %d", len(r.Addresses), maxStrings)
	case len(r.Cause) > maxCause:
		return r, fmt.Errorf("a cause of %d bytes; at most %d", len(r.Cause), maxCause)
	case r.Operation != nil && len(r.Operation.What) > maxWord:
		return r, fmt.Errorf("an operation's name of %d bytes; at most %d", len(r.Operation.What), maxWord)
	}
	for _, a := range r.Addresses {
		if len(a) > maxWord {
			return r, fmt.Errorf("an address of %d bytes; at most %d", len(a), maxWord)
		}
	}
	for _, rank := range r.Lost {
		if rank < 0 || rank > maxRank {
			return r, fmt.Errorf("rank %d is lost; there is none", rank)
		}
	}
	r.Lost = r.Lost[:min(len(r.Lost), maxStrings)]
	return r, nil
}

// errLong is returned for a line that is too long.
var errLong = fmt.Errorf("a line of more than %d bytes", maxLine)

// readLine returns the next line, without its end, in the memory of buf.
func readLine(in *bufio.Reader, buf []byte) ([]byte, error) {
	buf = buf[:0]
	for {
		part, err := in.ReadSlice('\n')
		if len(buf)+len(part) > maxLine {
			return nil, errLong
		}
		buf = append(buf, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(buf, []byte{'\n'}), nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(buf) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}

// The lines to a worker.
type (
	helloLine struct {
		Is          string     `json:"is"` // hello
		Version     int        `json:"version"`
		Run         string     `json:"run"`
		Host        string     `json:"host"`
		Slot        int        `json:"slot"`
		Incarnation string     `json:"incarnation"`
		Store       *storeAddr `json:"store,omitempty"`
		Library     string     `json:"library,omitempty"`
	}
	storeAddr struct {
		Host string `json:"host"`
		Port int    `json:"port"`
	}
	worldLine struct {
		Is         string       `json:"is"` // world
		Generation uint64       `json:"generation"`
		Rank       int          `json:"rank"`
		Size       int          `json:"size"`
		LocalRank  int          `json:"local_rank"`
		LocalSize  int          `json:"local_size"`
		CrossRank  int          `json:"cross_rank"`
		CrossSize  int          `json:"cross_size"`
		Root       int          `json:"root"`
		Seq        uint64       `json:"seq"`
		Handles    []string     `json:"handles"`
		Members    []memberLine `json:"members"`
		DataKey    string       `json:"data_key"`
		Store      *storeAddr   `json:"store,omitempty"`
	}
	memberLine struct {
		Host      string   `json:"host"`
		Slot      int      `json:"slot"`
		Addresses []string `json:"addresses"`
	}
	dismissedLine struct {
		Is   string `json:"is"` // dismissed
		Why  string `json:"why"`
		Last bool   `json:"last"`
	}
	updatedLine struct {
		Is         string   `json:"is"` // updated
		Seq        uint64   `json:"seq"`
		Change     []string `json:"change"`
		Generation uint64   `json:"generation"`
	}
	lostLine struct {
		Is         string `json:"is"` // lost
		Generation uint64 `json:"generation"`
		Ranks      []int  `json:"ranks"`
	}
	stacksLine struct {
		Is        string `json:"is"` // stacks
		ID        uint64 `json:"id"`
		MostBytes int    `json:"most_bytes"`
	}
	errorLine struct {
		Is    string `json:"is"` // error
		Text  string `json:"text"`
		Fatal bool   `json:"fatal"`
	}
	bareLine struct {
		Is string `json:"is"` // widen, leave
	}
)
