package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// variablesList is the list of the variables that are read.
const variablesList = "docs/reference/variables.txt"

// listedVariables returns the names in the first column of each row of variablesList.
func listedVariables(t *testing.T) (names [][]string) {
	t.Helper()
	text, err := os.ReadFile(variablesList)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		first, _, _ := strings.Cut(line[2:], " | ")
		var in []string
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(first, -1) {
			in = append(in, m[1])
		}
		names = append(names, in)
	}
	return names
}

// unseen are variables that programs read where the walk does not look: in Go's own packages, in
// Slurm's programs, in the plugin kubernetes, which is another module, or by a computed name.
var unseen = []string{"KUBECONFIG", "KUBERNETES_SERVICE_HOST", "PET_NNODES", "HVD_MIN_NP", "COBRA_ACTIVE_HELP", "HVDRUN_ACTIVE_HELP",
	"HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "GODEBUG", "GOMAXPROCS", "GOGC", "GOMEMLIMIT", "GOTRACEBACK",
	"SSL_CERT_FILE", "SSL_CERT_DIR", "LOCALDOMAIN", "RES_OPTIONS", "TMPDIR", "HOME", "PATH", "SBATCH_OUTPUT", "SLURM_CONF"}

// pieces look like variables, but are parts of names or keys of a file.
var pieces = []string{"COMPLETION_DESCRIPTIONS", "ACTIVE_HELP", "SELF_OBSERVABILITY", "PER_SERIES_START_TIMESTAMPS", "VERSION_ID", "PRETTY_NAME"}

// notOnLinux matches files of libraries that none of our programs contains.
var notOnLinux = regexp.MustCompile(`_(windows|darwin|plan9|js|wasm|openbsd|freebsd)\.go$`)

// TestVariablesThatAreRead: variablesList has each variable that a library linked into hvdrun or a
// plugin reads, and no others.
func TestVariablesThatAreRead(t *testing.T) {
	rows := listedVariables(t)
	read := variablesRead(t)
	for _, name := range unseen {
		read[name] = "others"
	}
	used := make(map[string]bool)
	for name, where := range read {
		found := false
		for _, row := range rows {
			for _, p := range row {
				if start, any := strings.CutSuffix(p, "*"); name == p || any && strings.HasPrefix(name, start) {
					used[p], found = true, true
				}
			}
		}
		if !found {
			t.Errorf("%s is read by %s and not in %s: find out what it does to a job, honour it or shut it off, and say so there",
				name, where, variablesList)
		}
	}
	for _, row := range rows {
		for _, p := range row {
			if !used[p] {
				t.Errorf("nothing reads %s of %s", p, variablesList)
			}
		}
	}
}

var (
	variableName = regexp.MustCompile(`^[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]$`)
	reader       = regexp.MustCompile(`^(Getenv|LookupEnv|GetEnv|getenv|Lookup|lookup|[a-z]\w*FromEnv|first\w*)$`)
)

// variablesRead returns the variables that our programs and the packages linked into them read, and
// which package reads each: the arguments of functions that read a variable, and, in packages that
// read variables by computed names, all strings that look like a variable.
func variablesRead(t *testing.T) map[string]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}\t{{.Dir}}\t{{join .GoFiles \" \"}}{{end}}", "./cmd/hvdrun", "./plugins/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	read := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		parts := strings.Split(strings.TrimSpace(line), "\t")
		if len(parts) != 3 {
			continue
		}
		var literals, direct []string
		computed := false
		for _, name := range strings.Fields(parts[2]) {
			if notOnLinux.MatchString(name) {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), parts[1]+"/"+name, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					if text, err := strconv.Unquote(lit.Value); err == nil && variableName.MatchString(text) {
						literals = append(literals, text)
					}
				}
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				var called string
				switch f := call.Fun.(type) {
				case *ast.Ident:
					called = f.Name
				case *ast.SelectorExpr:
					called = f.Sel.Name
				}
				if !reader.MatchString(called) {
					return true
				}
				for _, arg := range call.Args {
					if lit, ok := arg.(*ast.BasicLit); ok && lit.Kind == token.STRING {
						if text, err := strconv.Unquote(lit.Value); err == nil && regexp.MustCompile(`^[A-Z][A-Z0-9_]+$`).MatchString(text) {
							direct = append(direct, text)
						}
					} else if called == "Getenv" || called == "LookupEnv" {
						computed = true
					}
				}
				return true
			})
		}
		if computed && parts[0] != "github.com/hvdrun/hvdrun/plan" { // plan has the names that it writes
			direct = append(direct, literals...)
		}
		for _, name := range literals {
			if strings.HasPrefix(name, "OTEL_") {
				direct = append(direct, name)
			}
		}
		for _, name := range direct {
			if slices.Contains(pieces, name) {
				continue
			}
			read[name] = parts[0]
		}
	}
	if len(read) < 50 {
		t.Fatalf("only %d variables found", len(read))
	}
	return read
}
