"use strict";
(function () {
const data = JSON.parse(document.getElementById("data").textContent);
const colours = ["#1b7837", "#d73027", "#4575b4", "#f39c12", "#7b3294", "#00868b", "#8c510a"];
const colour = p => colours[data.policies.indexOf(p) % colours.length];
const unit = s => s == null ? "-" : s >= 1 ? +s.toPrecision(3) + " s" : s >= 1e-3 ? +(s * 1e3).toPrecision(3) + " ms" : +(s * 1e6).toPrecision(3) + " µs";
const width = () => Math.min(document.body.clientWidth, 1200);
const round = document.getElementById("round"), figure = document.getElementById("figure");
for (const r of new Set(data.runs.map(x => x.round))) round.add(new Option(r, r));

function chart(at, title, options, values) {
	const div = at.appendChild(document.createElement("div"));
	div.className = "chart";
	return new uPlot(Object.assign({title: title, width: width(), height: 360}, options), values, div);
}

const latencyScale = {distr: 3, range: (u, min, max) => min == null ? [1e-6, 1] : uPlot.rangeLog(Math.max(min, 1e-7), max, 10, true)};
const latencyAxis = {size: 80, values: (u, list) => list.map(v => v == null ? "" : unit(v)), filter: uPlot.log10AxisValsFilt};

// times draws a line a policy for one depth: first the window without collection, then that with it.
function times(depth) {
	const runs = data.policies.map(p => data.runs.find(x => x.policy == p && x.depth == depth && x.round == round.value)).filter(x => x);
	if (!runs.length) return;
	const pick = w => w[figure.value];
	const left = Math.max(...runs.map(x => pick(x.without).length)), right = Math.max(...runs.map(x => pick(x.with).length));
	const x = [];
	for (let i = 0; i < left + right; i++) x.push(i * data.bin);
	const border = left * data.bin;
	const values = [x], series = [{label: "time", value: (u, v) => v == null ? "-" : v.toFixed(1) + " s"}];
	for (const run of runs) {
		const line = pick(run.without).slice();
		while (line.length < left) line.push(null);
		line.push(...pick(run.with));
		while (line.length < left + right) line.push(null);
		values.push(line);
		series.push({label: run.policy, stroke: colour(run.policy), width: 1, paths: uPlot.paths.stepped({align: 1}), points: {show: false}, value: (u, v) => unit(v)});
	}
	const shade = u => {
		const c = u.ctx, box = u.bbox;
		c.save();
		c.beginPath();
		c.rect(box.left, box.top, box.width, box.height);
		c.clip();
		runs.forEach((run, i) => {
			if (!u.series[i + 1].show) return;
			c.globalAlpha = 0.12;
			c.fillStyle = colour(run.policy);
			for (const [shift, w] of [[0, run.without], [border, run.with]])
				for (const [from, to] of w.spans) {
					const a = u.valToPos(from + shift, "x", true), b = u.valToPos(to + shift, "x", true);
					c.fillRect(a, box.top, Math.max(b - a, 1), box.height);
				}
		});
		c.globalAlpha = 1;
		c.fillStyle = "#444";
		c.fillRect(u.valToPos(border, "x", true), box.top, 1, box.height);
		c.restore();
	};
	chart(document.getElementById("time"), "depth " + depth, {
		scales: {x: {time: false}, y: latencyScale}, series: series, axes: [{label: "seconds"}, latencyAxis], hooks: {drawClear: [shade]},
	}, values);
}

function percentiles(depth) {
	const names = data.policies.filter(p => data.curves[p + " " + depth]);
	if (!names.length) return;
	const values = [data.percentiles.map((p, i) => i)];
	const series = [{label: "percentile", value: (u, v) => v == null ? "-" : String(data.percentiles[v])}];
	for (const p of names) {
		const curve = data.curves[p + " " + depth];
		values.push(curve.with.map(v => v || null), curve.without.map(v => v || null));
		series.push({label: p, stroke: colour(p), width: 2, value: (u, v) => unit(v)});
		series.push({label: p + " without", stroke: colour(p), width: 1, dash: [6, 4], value: (u, v) => unit(v)});
	}
	chart(document.getElementById("percentiles"), "depth " + depth, {
		scales: {x: {time: false}, y: latencyScale}, series: series,
		axes: [{label: "percentile", splits: u => data.percentiles.map((p, i) => i), values: (u, list) => list.map(i => data.percentiles[i])}, latencyAxis],
	}, values);
}

function draw() {
	document.getElementById("time").textContent = "";
	data.depths.forEach(times);
}
round.onchange = figure.onchange = draw;
draw();
data.depths.forEach(percentiles);
})();
