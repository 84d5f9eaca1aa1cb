package dashboard

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// maxOutput bounds the bytes of a worker's output in one answer.
const maxOutput = 64 << 10

// Output is a part of a worker's output.
type Output struct {
	Text string `json:"text"`
	// From and To are the offsets of the part in the file, and Size is the size of the file, in
	// bytes.
	From int64 `json:"from"`
	To   int64 `json:"to"`
	Size int64 `json:"size"`
}

// output sends a part of a rank's output: from an offset on, or its end.
func (s *Server) output(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	rank, err := strconv.ParseUint(q.Get("rank"), 10, 31)
	stream := q.Get("stream")
	if err != nil || stream != "stdout" && stream != "stderr" {
		fail(w, http.StatusBadRequest, "rank must be a number, and stream stdout or stderr")
		return
	}
	from := int64(-1)
	if text := q.Get("from"); text != "" {
		if from, err = strconv.ParseInt(text, 10, 64); err != nil || from < 0 {
			fail(w, http.StatusBadRequest, "from must be a number of bytes")
			return
		}
	}
	p, err := s.cfg.Job.ReadOutput(int(rank), stream, from)
	if err != nil {
		fail(w, http.StatusNotFound, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p)
}

// ReadOutput returns at most 64 KiB of a rank's output to the stream, which is stdout or stderr:
// from the offset from on, or the end of the output if from is negative. It replaces bytes that are
// not UTF-8. If the file has become shorter than from, it returns its end.
func (j *Job) ReadOutput(rank int, stream string, from int64) (p Output, err error) {
	if j.Output == "" {
		return p, errors.New("the output of this job is not kept: run it with --output-filename DIR")
	}
	f, err := safefile.Read(filepath.Join(j.Output, "rank."+strconv.Itoa(rank), stream))
	if err != nil {
		return p, fmt.Errorf("nothing can be read: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return p, fmt.Errorf("nothing can be read: %w", err)
	}
	p.Size = fi.Size()
	if from < 0 || from > p.Size {
		from = max(0, p.Size-maxOutput)
	}
	b := make([]byte, min(maxOutput, p.Size-from))
	n, err := f.ReadAt(b, from)
	if err != nil && err != io.EOF {
		return p, fmt.Errorf("nothing can be read: %w", err)
	}
	p.From, p.To = from, from+int64(n)
	p.Text = strings.ToValidUTF8(string(b[:n]), "\uFFFD")
	return p, nil
}
