package main

import (
	"encoding/json"
	"os"
	"regexp"
	"strconv"
	"strings"
)

var mainAttr = regexp.MustCompile(`/(dirty_data|state|cache_mode|cache_available_percent|btree_cache_size|average_key_size|` +
	`root_usage_percent|tree_depth|btree_nodes|btree_used_percent|bset_tree_stats|priority_stats|backing_dev_uuid|running|nbuckets|` +
	`bucket_size|block_size|written|btree_written|metadata_written|discard|cache_replacement_policy|label|size|ro|active_journal_entries)$`)

var digits = regexp.MustCompile(`^\d+$`)

func assemble(args []string) any {
	root := map[string]any{}
	for _, a := range args {
		k, v, ok := strings.Cut(a, "=")
		if !ok {
			die("not KEY=VALUE: " + a)
		}
		var val any = v
		switch {
		case strings.HasPrefix(v, "#"):
			n, err := strconv.ParseFloat(v[1:], 64)
			must(err)
			val = n
		case strings.HasPrefix(v, "@"), strings.HasPrefix(v, "%"):
			b, err := os.ReadFile(v[1:])
			must(err)
			if val = strings.Split(strings.TrimRight(string(b), "\n"), "\n"); v[0] == '@' {
				val = nil
				must(json.Unmarshal(b, &val))
			}
		case strings.HasPrefix(v, "~"):
			b, err := os.ReadFile(v[1:])
			must(err)
			all, some := map[string]string{}, map[string]string{}
			must(json.Unmarshal(b, &all))
			for k, v := range all {
				if mainAttr.MatchString(k) {
					some[k] = v
				}
			}
			val = some
		case v == "true" || v == "false":
			val = v == "true"
		}
		m, ks := root, strings.Split(k, ".")
		for _, k := range ks[:len(ks)-1] {
			if _, ok := m[k].(map[string]any); !ok {
				m[k] = map[string]any{}
			}
			m = m[k].(map[string]any)
		}
		m[ks[len(ks)-1]] = val
	}
	return listify(root)
}

// listify turns maps whose keys are 0..n-1 into lists.
func listify(v any) any {
	m, ok := v.(map[string]any)
	if !ok {
		return v
	}
	n := 0
	for k := range m {
		m[k] = listify(m[k])
		if digits.MatchString(k) {
			n++
		}
	}
	if n == 0 || n != len(m) {
		return m
	}
	l := make([]any, n)
	for k, e := range m {
		if i := size(k); i < int64(n) {
			l[i] = e
		}
	}
	return l
}

func print(v any) {
	e := json.NewEncoder(os.Stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	must(e.Encode(v))
}
