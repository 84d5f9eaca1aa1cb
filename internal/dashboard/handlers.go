package dashboard

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"mime"
	"net/http"
	"strconv"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

//go:embed page
var embedded embed.FS

// policy lets a page load only its own files, and keeps text from becoming a script.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// landing is the answer to a browser that sends a token. It leads to the page by a URL without the
// token; if the token permits steering, the URL's fragment, which browsers do not send, has the
// proof. A redirect would not do: browsers that follow a link of another site leave out the cookie.
const landing = `<!doctype html><meta charset="utf-8"><title>hvdrun</title><meta http-equiv="refresh" content="0;url=/%s">`

// refused is the answer to requests without a token.
const refused = `<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>hvdrun: no token</title><link rel="stylesheet" href="/app.css"><body class="alone"><main>
<h1>This page needs its token</h1>
<p>Open the URL with <code>?token=…</code> that <code>hvdrun dashboard</code> has printed.
For the page of a job with <code>--dashboard-listen</code>, <code>hvdrun dashboard --url</code> prints it.</p></main></body></html>`

// handler serves all requests. It checks the host name of each request, then its token, then what
// the request may do.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	files, err := fs.Sub(embedded, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	page := http.FileServerFS(files)
	mux.Handle("GET /app.css", page)                                                  // the page for those without a token uses it too
	mux.HandleFunc("GET /favicon.ico", func(w http.ResponseWriter, r *http.Request) { // browsers request it in addition to the page's icon
		http.ServeFileFS(w, r, files, "icon.svg")
	})
	mux.HandleFunc("GET /{$}", s.index(page))
	mux.HandleFunc("GET /{file}", s.may(watch, page.ServeHTTP))
	mux.HandleFunc("GET /api/rights", s.may(watch, s.rights))
	mux.HandleFunc("GET /api/view", s.may(watch, s.view))
	mux.HandleFunc("GET /api/stream", s.may(watch, s.stream))
	mux.HandleFunc("GET /api/output", s.may(watch, s.output))
	mux.HandleFunc("POST /api/command", s.may(steer, s.command))
	own := http.NewCrossOriginProtection().Handler(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("Cache-Control", "no-store")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime))
		if !s.knows(r.Host) {
			http.Error(w, "this page is not served under that name: use its address", http.StatusMisdirectedRequest)
			return
		}
		own.ServeHTTP(w, r)
	})
}

// may passes on requests that have the right, and refuses others.
func (s *Server) may(needed right, next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch is := s.granted(r); {
		case is == nothing:
			fail(w, http.StatusUnauthorized, "the page needs its token: open the URL that hvdrun dashboard has printed")
		case is < needed:
			fail(w, http.StatusForbidden, "this page is for watching only: the URL to steer, which hvdrun dashboard prints, opens another")
		case !s.proven(r):
			w.Header().Set("Connection", "close")
			fail(w, http.StatusServiceUnavailable, "the connection took too long, or the page has too many")
		default:
			next(w, r)
		}
	}
}

// index accepts a token, or serves the page.
func (s *Server) index(page http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if granted := s.cfg.Tokens.grants(r.URL.Query().Get("token")); granted != nothing {
			s.proven(r)
			http.SetCookie(w, &http.Cookie{
				Name: s.cookie, Value: s.session, Path: "/", HttpOnly: true, Secure: s.tls != nil, SameSite: http.SameSiteStrictMode,
			})
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			fragment := ""
			if granted == steer {
				fragment = "#steer=" + s.proof
			}
			_, _ = fmt.Fprintf(w, landing, fragment) // fails if the browser has gone
			return
		}
		if s.granted(r) == nothing {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte(refused))
			return
		}
		s.proven(r)
		page.ServeHTTP(w, r)
	}
}

// fail answers with an error as JSON.
func fail(w http.ResponseWriter, status int, why string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": why})
}

// rights sends what the page may do.
func (s *Server) rights(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]bool{"write": s.granted(r) == steer})
}

// view sends the whole view, for programs.
func (s *Server) view(w http.ResponseWriter, r *http.Request) {
	select {
	case <-s.hub.looked:
	case <-r.Context().Done():
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(s.hub.full().text)
}

// stream sends the view, then its changes, as server-sent events.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	select {
	case <-s.hub.looked:
	case <-r.Context().Done():
		return
	}
	first, more, leave, err := s.hub.subscribe()
	if err != nil {
		w.Header().Set("Retry-After", "5")
		fail(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	defer leave()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	out := http.NewResponseController(w)
	send := func(m message) error {
		_ = out.SetWriteDeadline(time.Now().Add(answerTime))
		if _, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", m.name, m.text); err != nil {
			return err
		}
		return out.Flush()
	}
	_, _ = fmt.Fprint(w, "retry: 1000\n\n")
	if send(first) != nil {
		return
	}
	for {
		select {
		case m, open := <-more:
			if !open || send(m) != nil {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

// order is a command in the form that the page sends.
type order struct {
	Verb  job.Verb `json:"verb"`
	Host  string   `json:"host"`
	Slot  *int     `json:"slot"`
	For   float64  `json:"for"` // seconds
	MinNP *int     `json:"min_np"`
	MaxNP *int     `json:"max_np"`
	Now   bool     `json:"now"`
}

// command executes a command.
func (s *Server) command(w http.ResponseWriter, r *http.Request) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		fail(w, http.StatusUnsupportedMediaType, "a command is JSON")
		return
	}
	var o order
	from := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	from.DisallowUnknownFields()
	if err := from.Decode(&o); err != nil {
		fail(w, http.StatusBadRequest, "a command that makes no sense: "+err.Error())
		return
	}
	if !(o.For >= 0 && o.For < float64(math.MaxInt64/time.Second)) {
		fail(w, http.StatusBadRequest, "a time that makes no sense: "+strconv.FormatFloat(o.For, 'g', -1, 64)+" s")
		return
	}
	c := job.Command{
		Verb: o.Verb, Host: o.Host, Slot: o.Slot, For: time.Duration(o.For * float64(time.Second)), MinNP: o.MinNP, MaxNP: o.MaxNP, Now: o.Now,
	}
	if err := c.Check(); err != nil {
		fail(w, http.StatusBadRequest, err.Error())
		return
	}
	done, err := s.cfg.Job.Source.Command(r.Context(), c)
	s.hub.due.Set()
	if _, refused := errors.AsType[*job.RefusedError](err); refused {
		fail(w, http.StatusConflict, err.Error())
		return
	}
	if err != nil {
		fail(w, http.StatusBadGateway, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{"done": done})
}
