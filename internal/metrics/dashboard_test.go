package metrics

import (
	"encoding/json"
	"fmt"
	"strings"
)

// The parts of a Grafana dashboard, of schema version 39, that this one uses.
type (
	dashboard struct {
		UID           string     `json:"uid"`
		Title         string     `json:"title"`
		Description   string     `json:"description"`
		Tags          []string   `json:"tags"`
		SchemaVersion int        `json:"schemaVersion"`
		Editable      bool       `json:"editable"`
		Refresh       string     `json:"refresh"`
		Time          timeRange  `json:"time"`
		Templating    templating `json:"templating"`
		Panels        []panel    `json:"panels"`
	}
	timeRange struct {
		From string `json:"from"`
		To   string `json:"to"`
	}
	templating struct {
		List []variable `json:"list"`
	}
	variable struct {
		Name       string  `json:"name"`
		Label      string  `json:"label"`
		Type       string  `json:"type"`
		Query      string  `json:"query"`
		Datasource *source `json:"datasource,omitempty"`
		Refresh    int     `json:"refresh,omitempty"`
		Multi      bool    `json:"multi,omitempty"`
		IncludeAll bool    `json:"includeAll,omitempty"`
		AllValue   string  `json:"allValue,omitempty"`
	}
	source struct {
		Type string `json:"type"`
		UID  string `json:"uid"`
	}
	panel struct {
		ID          int          `json:"id"`
		Type        string       `json:"type"`
		Title       string       `json:"title"`
		Description string       `json:"description,omitempty"`
		Datasource  *source      `json:"datasource,omitempty"`
		GridPos     gridPos      `json:"gridPos"`
		Collapsed   *bool        `json:"collapsed,omitempty"`
		Panels      []panel      `json:"panels,omitempty"`
		FieldConfig *fieldConfig `json:"fieldConfig,omitempty"`
		Targets     []target     `json:"targets,omitempty"`
	}
	gridPos struct {
		H int `json:"h"`
		W int `json:"w"`
		X int `json:"x"`
		Y int `json:"y"`
	}
	fieldConfig struct {
		Defaults  fieldDefaults `json:"defaults"`
		Overrides []struct{}    `json:"overrides"`
	}
	fieldDefaults struct {
		Unit   string       `json:"unit"`
		Min    *float64     `json:"min,omitempty"`
		Custom *fieldCustom `json:"custom,omitempty"`
	}
	fieldCustom struct {
		FillOpacity int       `json:"fillOpacity"`
		Stacking    *stacking `json:"stacking,omitempty"`
	}
	stacking struct {
		Mode string `json:"mode"`
	}
	target struct {
		RefID        string `json:"refId"`
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat,omitempty"`
		Instant      bool   `json:"instant,omitempty"`
	}
)

// selector restricts every query to the values of the dashboard's variables.
const selector = `{job=~"$job",instance=~"$instance"}`

// makeDashboard returns the dashboard for Grafana: a row for each section, and a panel for each
// metric.
func makeDashboard() ([]byte, error) {
	prometheus := &source{"prometheus", "${datasource}"}
	d := dashboard{
		UID: "hvdrun", Title: "hvdrun", Description: "Jobs and agents of hvdrun", Tags: []string{"hvdrun"}, SchemaVersion: 39, Editable: true,
		Refresh: "10s", Time: timeRange{"now-1h", "now"},
		Templating: templating{[]variable{
			{Name: "datasource", Label: "Data source", Type: "datasource", Query: "prometheus"},
			{Name: "job", Label: "Scrape job", Type: "query", Query: `label_values({__name__=~"hvdrun_(job|agent)_info"}, job)`, Datasource: prometheus,
				Refresh: 2, Multi: true, IncludeAll: true, AllValue: ".+"},
			{Name: "instance", Label: "Instance", Type: "query", Query: `label_values({__name__=~"hvdrun_(job|agent)_info", job=~"$job"}, instance)`,
				Datasource: prometheus, Refresh: 2, Multi: true, IncludeAll: true, AllValue: ".+"},
		}},
	}
	const width, height, columns = 8, 8, 3
	y, id := 0, 1
	for _, section := range sections() {
		row := panel{ID: id, Type: "row", Title: string(section), GridPos: gridPos{1, 24, 0, y}, Collapsed: new(section == ranksSection)}
		id, y = id+1, y+1
		var panels []panel
		for _, m := range list {
			if m.Of == section {
				n := len(panels)
				p := m.panel(id, prometheus)
				p.GridPos = gridPos{height, width, width * (n % columns), y + height*(n/columns)}
				panels = append(panels, p)
				id++
			}
		}
		y += height * ((len(panels) + columns - 1) / columns)
		if *row.Collapsed {
			row.Panels, panels = panels, nil
		}
		d.Panels = append(append(d.Panels, row), panels...)
	}
	text, err := json.MarshalIndent(d, "", "  ")
	return append(text, '\n'), err
}

// panel returns the panel that shows the metric.
func (m *metric) panel(id int, from *source) panel {
	p := panel{
		ID: id, Type: "timeseries", Title: m.title(), Description: m.Help + ".", Datasource: from,
		FieldConfig: &fieldConfig{Defaults: fieldDefaults{Unit: m.Unit, Min: new(0.0)}, Overrides: []struct{}{}},
	}
	legend := m.Legend
	if legend == "" {
		labels := make([]string, 0, len(m.Labels))
		for _, l := range m.Labels {
			labels = append(labels, "{{"+l+"}}")
		}
		legend = strings.Join(append(labels, "{{instance}}"), " ")
	}
	by := strings.Join(append([]string{"instance"}, m.Labels...), ", ")
	switch {
	case m.Unit == "": // an info metric
		p.Type, p.FieldConfig = "stat", nil
		p.Targets = []target{{RefID: "A", Expr: m.Name + selector, LegendFormat: legend, Instant: true}}
	case m.Query != "":
		p.Targets = []target{{RefID: "A", Expr: m.Query, LegendFormat: legend}}
	case m.Kind == counter:
		p.Targets = []target{{RefID: "A", Expr: fmt.Sprintf("sum by (%s) (rate(%s%s[$__rate_interval]))", by, m.Name, selector), LegendFormat: legend}}
	case m.Kind == histogram:
		for i, q := range []string{"0.5", "0.9", "0.99"} {
			p.Targets = append(p.Targets, target{RefID: string(rune('A' + i)), LegendFormat: q + " " + legend, Expr: quantile(q, m.Name+selector, "$__rate_interval", by)})
		}
	default:
		p.Targets = []target{{RefID: "A", Expr: m.Name + selector, LegendFormat: legend}}
	}
	if m == jobSeconds {
		p.FieldConfig.Defaults.Custom = &fieldCustom{FillOpacity: 60, Stacking: &stacking{"normal"}}
	}
	if m == jobStart {
		p.Type, p.FieldConfig.Defaults.Min = "stat", nil
	}
	return p
}

// title returns the metric's name in words.
func (m *metric) title() string {
	name := strings.TrimPrefix(m.Name, "hvdrun_")
	for _, suffix := range []string{"_total", "_seconds", "_bytes"} {
		name = strings.TrimSuffix(name, suffix)
	}
	return strings.ReplaceAll(name, "_", " ")
}

// quantile returns the expression for a quantile of a histogram, with native or classic buckets.
// selector is the metric, possibly with matchers.
func quantile(q, selector, window, by string) string {
	name, matchers, _ := strings.Cut(selector, "{")
	if matchers != "" {
		matchers = "{" + matchers
	}
	return fmt.Sprintf("histogram_quantile(%s, sum by (%s) (rate(%s%s[%s]))) or histogram_quantile(%s, sum by (%s, le) (rate(%s_bucket%s[%s])))",
		q, by, name, matchers, window, q, by, name, matchers, window)
}

// sections returns all sections in their order.
func sections() []section {
	return []section{jobSection, driverSection, workersSection, ranksSection, agentSection}
}
