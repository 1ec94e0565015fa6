//! One prefill at a time: F22 and F23.

/// Jobs of one server that all arrive at once, by what they cost, in the order they came.
#[derive(Debug, Clone, Copy)]
pub struct Jobs<'j> {
    /// Cost of each.
    pub costs: &'j [f64],
    /// Cost that is served in a unit of time.
    pub rate: f64,
}

impl Jobs<'_> {
    /// First come, first served: the order they came.
    pub fn fcfs(&self) -> Vec<usize> {
        (0..self.costs.len()).collect()
    }

    /// Shortest first, equals in the order they came.
    pub fn shortest_first(&self) -> Vec<usize> {
        self.ordered(|_, cost| cost)
    }

    /// F23: lowest `cost - k waited` first, as lecture B has it. All have waited equally long, so
    /// `k` changes nothing: shortest first.
    pub fn linear_ageing(&self, k: f64) -> Vec<usize> {
        self.ordered(|waited, cost| cost - k * waited)
    }

    /// F23 as it was meant: shortest first, but a job whose `cost - k waited` has come down to the
    /// plain cost of the job that would be next goes before it.
    pub fn promotion(&self, k: f64) -> Vec<usize> {
        let (mut order, mut waited) = (Vec::new(), 0.0);
        let mut left = self.shortest_first();
        while let Some(&next) = left.first() {
            let aged = |job: usize| self.costs[job] - k * waited;
            let is_promoted = |job: &&usize| {
                self.costs[**job] > self.costs[next] && aged(**job) <= self.costs[next]
            };
            let chosen = left.iter().find(is_promoted).copied().unwrap_or(next);
            left.retain(|job| *job != chosen);
            waited += self.costs[chosen] / self.rate;
            order.push(chosen);
        }
        order
    }

    /// Serves the job of the lowest key, equals in the order they came; the key may use how long
    /// all have waited.
    fn ordered(&self, key: impl Fn(f64, f64) -> f64) -> Vec<usize> {
        let (mut order, mut waited) = (Vec::new(), 0.0);
        let mut left = self.fcfs();
        while !left.is_empty() {
            let key = |job: &usize| key(waited, self.costs[*job]);
            let least = left.iter().copied().min_by(|a, b| key(a).total_cmp(&key(b)));
            let chosen = least.expect("the list is not empty");
            left.retain(|job| *job != chosen);
            waited += self.costs[chosen] / self.rate;
            order.push(chosen);
        }
        order
    }

    /// F22: when each job is done, by job: the sum of its cost and of those before it.
    pub fn done(&self, order: &[usize]) -> Vec<f64> {
        let (mut done, mut now) = (vec![0.0; self.costs.len()], 0.0);
        for &job in order {
            now += self.costs[job] / self.rate;
            done[job] = now;
        }
        done
    }

    /// F22: the mean of [`Jobs::done`]; 0 without jobs.
    pub fn mean_done(&self, order: &[usize]) -> f64 {
        self.done(order).iter().sum::<f64>() / self.costs.len().max(1) as f64
    }
}

/// The `k` of [`Jobs::promotion`] from which on a long job overtakes after `shorts` short ones:
/// `(long - short) / (shorts short / rate)`.
pub fn promotion_threshold(long: f64, short: f64, shorts: usize, rate: f64) -> f64 {
    (long - short) / (shorts as f64 * short / rate)
}
