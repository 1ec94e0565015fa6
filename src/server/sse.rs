//! Server-sent events.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{Stream, unfold};
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

/// One event: `data: {...}`, with its name where the API has names.
pub fn event(name: Option<&str>, data: &impl Serialize) -> String {
    let mut event = Vec::with_capacity(USUAL_BYTES);
    if let Some(name) = name {
        event.extend_from_slice(b"event: ");
        event.extend_from_slice(name.as_bytes());
        event.push(b'\n');
    }
    event.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut event, data).expect("its keys are strings");
    event.extend_from_slice(b"\n\n");
    String::from_utf8(event).expect("JSON is UTF-8")
}

/// Room for the event of a token.
const USUAL_BYTES: usize = 320;

/// The end of an OpenAI stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// What is sent after a silence.
const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// What gives a stream its events.
pub trait Source: Send + 'static {
    /// The next events as text, none at the end. Dropped and called again when a keep-alive is
    /// due in between: it must lose nothing then.
    fn next(&mut self) -> impl Future<Output = Option<String>> + Send;
}

/// The answer that streams `source`, with a comment after each silence of `keep_alive`; with zero
/// there is none.
pub fn response<S: Source>(source: S, keep_alive: Duration) -> Response {
    let headers = [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(stream(source, keep_alive))).into_response()
}

fn stream<S: Source>(
    source: S,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let silence = (!keep_alive.is_zero()).then(|| Silence::new(keep_alive));
    unfold((source, silence), async move |(mut source, mut silence)| {
        let next = match &mut silence {
            Some(silence) => silence.broken_by(source.next()).await,
            None => source.next().await,
        };
        next.map(|text| (Ok(Bytes::from(text)), (source, silence)))
    })
}

/// The silence of a stream. Its timer is not set anew with every event, which costs more than the
/// event: it is asked when it ends whether there was one.
struct Silence {
    longest: Duration,
    since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Silence {
    fn new(longest: Duration) -> Silence {
        Silence { longest, since: Instant::now(), timer: Box::pin(sleep(longest)) }
    }

    /// What `next` says, or a comment when it says nothing for too long.
    async fn broken_by(&mut self, next: impl Future<Output = Option<String>>) -> Option<String> {
        let mut next = pin!(next);
        poll_fn(|context| {
            if let Poll::Ready(next) = next.as_mut().poll(context) {
                self.since = Instant::now();
                return Poll::Ready(next);
            }
            while self.timer.as_mut().poll(context).is_ready() {
                let now = Instant::now();
                let is_over = now - self.since >= self.longest;
                if is_over {
                    self.since = now;
                }
                self.timer.as_mut().reset(self.since + self.longest);
                if is_over {
                    return Poll::Ready(Some(KEEP_ALIVE.to_owned()));
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use tokio::time::{Interval, interval};

    use super::*;

    const TICK: Duration = Duration::from_millis(20);

    /// Speaks with each of its first ticks, and ends with the last after a silence.
    struct Clock {
        ticks: Interval,
        count: u32,
    }

    impl Source for Clock {
        async fn next(&mut self) -> Option<String> {
            loop {
                self.ticks.tick().await;
                self.count += 1;
                match self.count {
                    1..=8 => return Some(format!("{} ", self.count)),
                    9..=23 => {}
                    _ => return None,
                }
            }
        }
    }

    fn heard(keep_alive: Duration) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let bytes = runtime.expect("a runtime").block_on(async {
            let clock = Clock { ticks: interval(TICK), count: 0 };
            stream(clock, keep_alive)
                .map(|bytes| bytes.expect("no error"))
                .collect::<Vec<_>>()
                .await
        });
        String::from_utf8(bytes.concat()).expect("text")
    }

    #[test]
    fn a_comment_follows_each_silence_and_every_event_puts_it_off() {
        let (events, comments) = ("1 2 3 4 5 6 7 8 ", heard(5 * TICK));
        let comments = comments.strip_prefix(events).expect("no comment between events");
        assert!(!comments.is_empty(), "the silence has comments");
        let count = comments.len() / KEEP_ALIVE.len();
        assert_eq!(comments, KEEP_ALIVE.repeat(count));
        assert!((1..=3).contains(&count), "{count} comments in a silence of three times the limit");
        assert_eq!(heard(Duration::ZERO), events, "none where none are wanted");
    }

    #[test]
    fn an_event_is_one_line_of_data_with_its_name_before_it() {
        let data = serde_json::json!({ "text": "a\nb" });
        assert_eq!(event(None, &data), "data: {\"text\":\"a\\nb\"}\n\n");
        assert_eq!(event(Some("x"), &data), "event: x\ndata: {\"text\":\"a\\nb\"}\n\n");
    }
}
